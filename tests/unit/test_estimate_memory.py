"""Bytes, against published figures and sums made by hand; docs/estimate.md names the sources."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from labctl.errors import UsageError
from labctl.estimate.constants import OPTIMIZERS, OVERHEAD_BYTES, PRECISIONS
from labctl.estimate.memory import (
    TERMS,
    checkpoint_bytes,
    estimate_memory,
    find_largest_term,
    kv_cache,
    simple_activations,
)
from labctl.estimate.plan import ModelMeasurement, ModelPlan, parse_count, require_consistent

GB = 10**9
LLAMA_8B = ModelPlan(params=8 * GB, seq=2048, hidden=4096, layers=32, heads=32, kv_heads=8)
LLAMA_70B = ModelPlan(params=70 * GB, precision="fp16", seq=4096, hidden=8192, layers=80, heads=64)
BERT = ModelPlan(
    params=110_000_000,
    precision="fp16",
    optimizer="adam",
    batch=32,
    seq=512,
    hidden=768,
    layers=12,
    heads=12,
    vocabulary=30_522,
)


def of(plan: ModelPlan, **changed: Any) -> Any:
    return estimate_memory(require_consistent(replace(plan, **changed)))


@pytest.mark.parametrize(
    ("params", "precision", "gb"),
    [
        (8, "fp32", 32), (8, "fp16", 16), (8, "int8", 8), (8, "int4", 4),
        (70, "fp32", 280), (70, "fp16", 140), (70, "int8", 70), (70, "int4", 35),
        (8, "tf32", 32), (8, "bf16", 16), (8, "fp8", 8),
    ],
)  # fmt: skip
def test_weights_of_llama_3(params: int, precision: Any, gb: int) -> None:
    assert of(ModelPlan(params=params * GB, precision=precision)).weights_bytes == gb * GB


def test_training_8b_with_adam_is_64_gb_by_the_simple_rule_and_16_bytes_each_in_truth() -> None:
    found = of(ModelPlan(params=8 * GB, precision="fp16", optimizer="adam"))
    assert found.simple_rule_bytes == 64 * GB
    assert found.weights_bytes + found.gradients_bytes + found.optimizer_bytes == 16 * 8 * GB
    assert found.total_bytes == 128 * GB + OVERHEAD_BYTES


@pytest.mark.parametrize(
    ("optimizer", "precision", "each"),
    [
        ("sgd", "fp32", 4 + 4),
        ("momentum", "fp32", 4 + 4 + 4),
        ("adam", "fp32", 4 + 4 + 8),
        ("adamw", "tf32", 4 + 4 + 8),
        ("adam8bit", "fp32", 4 + 4 + 2),
        ("sgd", "bf16", 2 + 2 + 4),
        ("momentum", "bf16", 2 + 2 + 4 + 4),
        ("adamw", "bf16", 2 + 2 + 4 + 8),
        ("adam8bit", "bf16", 2 + 2 + 4 + 2),
        ("adam", "fp8", 1 + 2 + 4 + 8),
    ],
)
def test_bytes_of_each_parameter(optimizer: Any, precision: Any, each: int) -> None:
    found = of(ModelPlan(params=1000, optimizer=optimizer, precision=precision))
    assert found.total_bytes - found.overhead_bytes == 1000 * each


def test_activations_of_8b_are_4_gb_by_the_simple_rule_and_17_times_that_in_truth() -> None:
    plan = require_consistent(
        replace(LLAMA_8B, optimizer="adam", batch=8, kv_heads=32, vocabulary=128_256)
    )
    assert simple_activations(plan) == 8 * 2048 * 4096 * 32 * 2
    assert simple_activations(plan) == pytest.approx(4 * GB, rel=0.08)
    tokens = 8 * 2048
    by_hand = 34 * tokens * 4096 * 32 + tokens * 128_256 * (4 + 2)
    assert estimate_memory(plan).activations_bytes == by_hand
    assert by_hand - tokens * 128_256 * 6 == 17 * simple_activations(plan)


def test_bert_base_keeps_8_gb() -> None:
    """Fused attention, and the scores over its vocabulary; with stored attention it is 14."""
    assert of(BERT).activations_bytes == pytest.approx(8 * GB, rel=0.05)
    assert of(BERT, vocabulary=0).activations_bytes == pytest.approx(8 * GB, rel=0.05)
    stored = of(BERT, attention="stored").activations_bytes - of(BERT).activations_bytes
    assert stored == 5 * 12 * 512 * 512 * 32 * 12
    # The whole layer as the paper has it: s b h (34 + 5 a s / h)
    per_layer = 512 * 32 * 768 * (34 + 5 * 12 * 512 / 768)
    logits = 512 * 32 * 30_522 * 6
    assert of(BERT, attention="stored").activations_bytes == round(12 * per_layer) + logits


def test_fp32_activations_are_twice_as_large_but_for_the_dropout_masks() -> None:
    half, full = of(BERT), of(BERT, precision="fp32")
    tokens = 32 * 512
    masks = 2 * tokens * 768 * 12
    assert full.activations_bytes - tokens * 30_522 * 8 == (
        2 * (half.activations_bytes - tokens * 30_522 * 6 - masks) + masks
    )


def test_checkpointing_keeps_one_tensor_a_layer_and_one_layer_whole() -> None:
    plan = replace(LLAMA_8B, optimizer="adam", batch=8, kv_heads=0, checkpointing=True)
    tokens = 8 * 2048
    logits = tokens * 32_000 * 6
    assert of(plan).activations_bytes == tokens * 4096 * (2 * 32 + 34) + logits


def test_accumulating_divides_what_passes_through_at_once() -> None:
    whole = of(LLAMA_8B, optimizer="adam", batch=8).activations_bytes
    assert of(LLAMA_8B, optimizer="adam", batch=8, accumulate=4).activations_bytes == whole / 4
    assert of(LLAMA_8B, optimizer="adam", batch=8, data_parallel=8).activations_bytes == whole / 8


def test_kv_cache_of_70b_by_the_full_heads_and_by_its_eight() -> None:
    plan = require_consistent(replace(LLAMA_70B, kv_heads=8))
    assert kv_cache(plan) == 2 * 80 * 8192 * 4096 * 2
    assert kv_cache(plan) == pytest.approx(10 * GB, rel=0.08)
    assert kv_cache(plan, 8) == kv_cache(plan) / 8 == 1_342_177_280
    assert estimate_memory(plan).kv_cache_bytes == 1_342_177_280


def test_kv_cache_of_llama_3_8b_is_128_kib_a_token() -> None:
    """2 x 32 layers x 8 heads x 128 wide x 2 bytes."""
    assert of(LLAMA_8B, seq=1).kv_cache_bytes == 128 * 1024
    assert of(LLAMA_8B, seq=8192, batch=4).kv_cache_bytes == 4 * 1024**3
    quantised = of(LLAMA_8B, seq=8192, batch=4, precision="int4")
    assert quantised.kv_cache_bytes == 4 * 1024**3
    assert of(LLAMA_8B, seq=1, precision="fp32").kv_cache_bytes == 256 * 1024


def test_a_training_has_no_kv_cache_and_use_has_no_gradients() -> None:
    assert of(LLAMA_8B, optimizer="adam").kv_cache_bytes == 0
    assert of(LLAMA_8B).gradients_bytes == of(LLAMA_8B).optimizer_bytes == 0


def test_a_checkpoint_of_8b_in_fp32_with_adam_is_96_gb() -> None:
    plan = ModelPlan(params=8 * GB, precision="fp32", optimizer="adam")
    assert checkpoint_bytes(plan) == 96 * GB
    assert checkpoint_bytes(replace(plan, precision="bf16")) == 96 * GB
    assert checkpoint_bytes(replace(plan, optimizer="")) == 0


@pytest.mark.parametrize(
    ("stage", "gb"),
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)],
)
def test_zero_divides_as_its_paper_says(stage: int, gb: float) -> None:
    """Figure 1 of arXiv:1910.02054: 7.5B parameters on 64 GPUs."""
    found = of(
        ModelPlan(params=7_500_000_000, optimizer="adam", batch=64),
        data_parallel=64 if stage else 1,
        zero=stage,
    )
    state = found.weights_bytes + found.gradients_bytes + found.optimizer_bytes
    assert state / GB == pytest.approx(gb, abs=0.06)


def test_tensor_and_pipeline_parallel_divide_the_state() -> None:
    plan = ModelPlan(params=8 * GB, optimizer="adam", tensor_parallel=4, pipeline_parallel=2)
    found = of(plan)
    assert found.total_bytes - found.overhead_bytes == 16 * 8 * GB / 8


def test_tensor_parallel_leaves_what_the_paper_says_undivided() -> None:
    """s b h (10 + 24/t) a layer (arXiv:2205.05198, equation 2, without stored attention)."""
    plan = replace(LLAMA_8B, optimizer="adam", kv_heads=0, tensor_parallel=8)
    by_hand = 2048 * 4096 * (10 + 24 / 8) * 32 + 2048 * 32_000 * 6 / 8
    assert of(plan).activations_bytes == by_hand


def test_the_first_stage_of_a_pipeline_holds_a_micro_batch_for_each_stage() -> None:
    plan = replace(LLAMA_8B, optimizer="adam", batch=16, kv_heads=0)
    alone = of(plan, accumulate=16).activations_bytes
    staged = of(plan, accumulate=16, pipeline_parallel=4).activations_bytes
    assert staged == alone - 2048 * 32_000 * 6  # as many layers' worth, and the scores elsewhere
    once = of(plan, accumulate=1, batch=1, pipeline_parallel=4).activations_bytes
    assert once == 34 * 2048 * 4096 * 8 + 2048 * 32_000 * 6


def test_the_kv_cache_is_divided_among_tensor_parallel_gpus_up_to_its_heads() -> None:
    whole = of(LLAMA_8B).kv_cache_bytes
    assert of(LLAMA_8B, tensor_parallel=8).kv_cache_bytes == whole / 8
    assert of(LLAMA_8B, tensor_parallel=16).kv_cache_bytes == whole / 8
    assert of(LLAMA_8B, pipeline_parallel=2).kv_cache_bytes == whole / 2


def test_the_total_is_the_sum_for_every_precision_and_optimizer() -> None:
    for precision in PRECISIONS:
        for optimizer in ("", *OPTIMIZERS):
            if optimizer and precision in ("int8", "int4"):
                continue
            found = of(LLAMA_8B, precision=precision, optimizer=optimizer)
            assert found.total_bytes == sum(getattr(found, f"{term}_bytes") for term in TERMS)
            assert getattr(found, f"{find_largest_term(found)}_bytes") >= found.total_bytes / 6


CODE = ModelMeasurement(
    parameters=1000,
    weight_bytes=4100,
    trained_parameters=600,
    trained_bytes=2400,
    fixed_bytes=50,
    item_bytes=700,
    item_flops=6000,
)


def test_a_model_from_code_counts_its_own_bytes() -> None:
    found = of(ModelPlan(measured=CODE, precision="fp32", optimizer="adamw", batch=8))
    assert found.weights_bytes == 4100
    assert found.gradients_bytes == 2400
    assert found.optimizer_bytes == 4800
    assert found.activations_bytes == 50 + 8 * 700
    assert (
        of(ModelPlan(measured=CODE, precision="fp32", optimizer="adam8bit")).optimizer_bytes == 1200
    )
    assert of(ModelPlan(measured=CODE, precision="bf16", optimizer="sgd")).optimizer_bytes == 0
    assert checkpoint_bytes(ModelPlan(measured=CODE, optimizer="adamw")) == 4100 + 4800


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8B", 8 * GB), ("8b", 8 * GB), ("512M", 512_000_000), ("1.5T", 1500 * GB),
        ("100k", 100_000), ("3e11", 300 * GB), ("7", 7), ("110,000", 110_000),
    ],
)  # fmt: skip
def test_counts_as_people_write_them(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize(
    "text", ["", "B", "8X", "-1", "0", "nan", "inf", "1e99", "8 B 9", "2T" * 9]
)
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError):
        parse_count(text)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"params": 0}, "no model"),
        ({"precision": "int4", "optimizer": "adam"}, "cannot be trained"),
        ({"layers": 0}, "--layers missing"),
        ({"hidden": 4097}, "multiple of --heads"),
        ({"kv_heads": 5}, "multiple of --kv-heads"),
        ({"zero": 2, "optimizer": "adam"}, "nothing to divide"),
        ({"optimizer": "adam", "batch": 4, "accumulate": 8}, "cannot be divided"),
        ({"pipeline_parallel": 64}, "32 layers"),
        ({"kind": "trees"}, "--rows"),
        ({"measured": CODE, "precision": "int8"}, "not measured in int8"),
        ({"measured": CODE, "tensor_parallel": 2}, "measured whole"),
    ],
)
def test_questions_that_make_no_sense_are_refused_with_the_way_out(
    changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        require_consistent(replace(LLAMA_8B, **changed))
    assert raised.value.hint

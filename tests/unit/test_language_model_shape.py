"""The memory of language models, held against the figures that their makers published."""

from __future__ import annotations

import json
from typing import Any

import pytest

from labctl.estimate.language_model import (
    LARGEST_CONFIG_BYTES,
    count_parameters,
    kv_bytes_per_token,
    kv_cache_bytes,
    longest_fitting_context,
    parse_shape,
)
from labctl.estimate.weight_formats import parse_format, weight_bytes

GIB = 1024**3


def config(kind: str, sizes: str, **more: Any) -> dict[str, Any]:
    """`sizes`: hidden, layers, heads, key-value heads, MLP width, vocabulary, longest context."""
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
    names += "intermediate_size vocab_size max_position_embeddings"
    numbers = dict(zip(names.split(), map(int, sizes.split()), strict=True))
    return {"model_type": kind, "torch_dtype": "bfloat16", **numbers, **more}


LLAMA_3_8B = config("llama", "4096 32 32 8 14336 128256 131072", tie_word_embeddings=False)
LLAMA_2_7B = config("llama", "4096 32 32 32 11008 32000 4096", tie_word_embeddings=False)
MISTRAL_7B = config("mistral", "4096 32 32 8 14336 32000 32768", sliding_window=4096)
MIXTRAL = config(
    "mixtral", "4096 32 32 8 14336 32000 32768", num_local_experts=8, num_experts_per_tok=2,
    sliding_window=None,
)  # fmt: skip
QWEN_1_5B = config(
    "qwen2", "1536 28 12 2 8960 151936 32768", tie_word_embeddings=True, use_sliding_window=False,
    sliding_window=32768, max_window_layers=21,
)  # fmt: skip
QWEN_7B = config("qwen2", "3584 28 28 4 18944 152064 32768", tie_word_embeddings=False)
QWEN3_30B = config(
    "qwen3_moe", "2048 48 32 4 6144 151936 40960", head_dim=128, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_06B = config(
    "qwen3", "1024 28 16 8 3072 151936 40960", head_dim=128, tie_word_embeddings=True
)
GEMMA_2_2B = config("gemma2", "2304 26 8 4 9216 256000 8192", head_dim=256, sliding_window=4096)
GEMMA_3_1B = config(
    "gemma3_text", "1152 26 4 1 6912 262144 32768", head_dim=256, sliding_window=512
)
PHI_3_MINI = config("phi3", "3072 32 32 32 8192 32064 4096", tie_word_embeddings=False)
# The number of parameters on each model's page, as the metadata of its safetensors has it.
PUBLISHED = [
    (LLAMA_3_8B, 8_030_261_248),
    (LLAMA_2_7B, 6_738_415_616),
    (MISTRAL_7B, 7_241_732_096),
    (MIXTRAL, 46_702_792_704),
    (QWEN_1_5B, 1_543_714_304),
    (QWEN_7B, 7_615_616_512),
    (QWEN3_30B, 30_532_122_624),
    (QWEN3_06B, 596_049_920),
    (GEMMA_2_2B, 2_614_341_888),
    (GEMMA_3_1B, 999_885_952),
    (PHI_3_MINI, 3_821_079_552),
]


def shape(body: dict[str, Any]) -> Any:
    return parse_shape(json.dumps(body).encode())


@pytest.mark.parametrize(("body", "parameters"), PUBLISHED)
def test_parameters_are_those_that_were_published(body: dict[str, Any], parameters: int) -> None:
    assert count_parameters(shape(body)).total == parameters
    assert shape(body).is_counted


def test_a_mixture_of_experts_uses_a_part_of_its_parameters_for_a_token() -> None:
    # "47B parameters, but only uses 13B active parameters" (arXiv:2401.04088); Qwen3: 3.3B.
    assert round(count_parameters(shape(MIXTRAL)).active / 1e9, 1) == 12.9
    assert 3.3e9 < count_parameters(shape(QWEN3_30B)).active < 3.4e9
    dense = count_parameters(shape(LLAMA_3_8B))
    assert dense.active == dense.total


def test_the_cache_of_a_token_is_that_of_the_papers() -> None:
    # PagedAttention (arXiv:2309.06180), section 3: 800 KB a token for OPT-13B.
    opt = config("llama", "5120 40 40 40 20480 50272 2048")
    assert kv_bytes_per_token(shape(opt)) == 800 * 1024
    assert kv_bytes_per_token(shape(LLAMA_2_7B)) == 512 * 1024
    # Grouped queries: 8 heads for 32, so a quarter of it.
    assert kv_bytes_per_token(shape(LLAMA_3_8B)) == 128 * 1024
    assert kv_bytes_per_token(shape(QWEN_1_5B)) == 28 * 1024
    # A head width of its own: not hidden / heads = 64.
    assert kv_bytes_per_token(shape(QWEN3_06B)) == 112 * 1024
    assert kv_bytes_per_token(shape(LLAMA_3_8B), "fp8") == 64 * 1024
    assert kv_cache_bytes(shape(LLAMA_3_8B), 131_072) == 16 * GIB


def test_a_sliding_window_bounds_the_cache() -> None:
    # Mistral (arXiv:2310.06825), section 2: 32k tokens need 8x less with a window of 4,096.
    mistral = shape(MISTRAL_7B)
    assert kv_cache_bytes(mistral, 32_768) * 8 == 32_768 * kv_bytes_per_token(mistral)
    gemma = shape(GEMMA_2_2B)
    assert (gemma.windowed_layers, gemma.window) == (13, 4096)
    gemma_3 = shape(GEMMA_3_1B)
    assert gemma_3.windowed_layers == 22
    # Qwen names a window, and says that it is not used.
    assert shape(QWEN_1_5B).windowed_layers == 0
    listed = shape({**GEMMA_2_2B, "layer_types": ["sliding_attention"] * 3 + ["full"] * 23})
    assert listed.windowed_layers == 3


def test_the_longest_context_that_fits() -> None:
    llama = shape(LLAMA_3_8B)
    assert longest_fitting_context(llama, GIB) == 8192
    assert longest_fitting_context(llama, GIB - 1) == 8192 - 16
    assert longest_fitting_context(llama, 10**15) == 131_072
    assert longest_fitting_context(llama, -1) == longest_fitting_context(llama, 1000) == 0
    # Beyond the window, a token of Mistral costs nothing.
    assert longest_fitting_context(shape(MISTRAL_7B), 512 * 1024**2) == 32_768


def test_weights_in_the_formats_of_servers() -> None:
    llama = shape(LLAMA_3_8B)
    assert weight_bytes(llama, "none") == 2 * 8_030_261_248
    # The sizes of the files on the models' pages: 5.7 GB in AWQ, 4.9 GB in Q4_K_M, 8.5 in Q8_0.
    assert round(weight_bytes(llama, "awq") / 1e9, 1) == 5.7
    assert round(weight_bytes(llama, "gguf:Q4_K_M") / 1e9, 1) == 4.9
    assert round(weight_bytes(llama, "gguf:Q8_0") / 1e9, 1) == 8.5
    assert weight_bytes(llama, "bnb-4bit") < weight_bytes(llama, "int8")
    assert parse_format("GGUF:q4_k_m".replace("GGUF", "gguf")) == "gguf:Q4_K_M"
    for wrong in ("q4", "gguf:", "gguf:Q99", "gguf:Q4_K_M;rm", "awq\n"):
        with pytest.raises(ValueError, match="is not one of"):
            parse_format(wrong)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * (LARGEST_CONFIG_BYTES + 1),
        json.dumps({**LLAMA_3_8B, "num_hidden_layers": 10**30}).encode(),
        json.dumps({**LLAMA_3_8B, "hidden_size": -1}).encode(),
        json.dumps({**LLAMA_3_8B, "hidden_size": "4096"}).encode(),
        json.dumps({**LLAMA_3_8B, "num_attention_heads": 0}).encode(),
        json.dumps({**LLAMA_3_8B, "num_key_value_heads": 7}).encode(),
        json.dumps({**LLAMA_3_8B, "hidden_size": 4097}).encode(),
        json.dumps({**LLAMA_3_8B, "layer_types": ["x"], "sliding_window": 4}).encode(),
        json.dumps({**LLAMA_3_8B, "kv_lora_rank": 512}).encode(),
    ],
)
def test_a_config_that_is_none_is_refused_with_a_reason(text: bytes) -> None:
    with pytest.raises(ValueError) as refused:
        parse_shape(text)
    assert str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "4096"}, r"\$\.hidden_size"),
        ({"hidden_size": 10**9}, r"100000000.*\$\.hidden_size"),
        ({"num_hidden_layers": -3}, r"\$\.num_hidden_layers"),
        ({"text_config": "x", "hidden_size": None}, r"\$\.text_config"),
    ],
)
def test_a_reason_names_the_field(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_shape(json.dumps({**LLAMA_3_8B, **change}).encode())
    with pytest.raises(ValueError, match="it is damaged: not valid JSON"):
        parse_shape(json.dumps({**LLAMA_3_8B, **change}).encode()[:20])


def test_zero_experts_and_a_window_of_zero_are_none() -> None:
    body = {**LLAMA_3_8B, "num_local_experts": 0, "num_experts_per_tok": 0, "sliding_window": 0}
    assert shape(body) == shape(LLAMA_3_8B)


def test_the_text_part_of_a_model_of_pictures_is_used() -> None:
    body = {"model_type": "gemma3", "text_config": GEMMA_3_1B, "vision_config": {"x": [1]}}
    assert shape(body) == shape(GEMMA_3_1B)

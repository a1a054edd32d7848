"""Operations, hours and compute_cost_usd, against published figures."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from labctl.estimate.advice import judge_gpu, list_suggestions, why_simple_differs
from labctl.estimate.cards import Card, find_card
from labctl.estimate.compute import (
    Workload,
    compute_cost_usd,
    compute_hours,
    compute_load,
    flops,
    measured_hours,
    peak_flops,
    token_seconds,
    weight_seconds,
)
from labctl.estimate.fit_time import compute_fit_seconds
from labctl.estimate.fits import compare_gpus, find_largest_gpu, find_smallest_gpu, usable_bytes
from labctl.estimate.memory import estimate_memory
from labctl.estimate.plan import FitMeasurement, ModelMeasurement, ModelPlan

GB, GIB, TFLOPS = 10**9, 1024**3, 1e12
GPT_3 = ModelPlan(params=175 * GB, precision="fp16", optimizer="adam")
ALL_TOKENS = Workload(tokens=300 * GB)
SHAPED = ModelPlan(params=8 * GB, optimizer="adam", batch=8, seq=2048, hidden=4096, layers=32)


def known(name: str, gib: int) -> Card:
    found = find_card(name, gib * GIB)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "mib", "card"),
    [
        ("NVIDIA H200", 143_771, "H200"),
        ("NVIDIA H100 80GB HBM3", 81_559, "H100"),
        ("NVIDIA A100-SXM4-40GB", 40_960, "A100"),
        ("Tesla V100-SXM2-32GB", 32_768, "V100"),
        ("Tesla T4", 15_360, "T4"),
        ("NVIDIA A10G", 23_028, "A10G"),
        ("T4g", 16_384, "T4G"),
        ("NVIDIA H100 PCIe", 81_559, None),
        ("NVIDIA A10", 23_028, None),
        ("", 0, None),
    ],
)
def test_a_card_is_known_by_the_name_that_nvidia_smi_prints(
    name: str, mib: int, card: str | None
) -> None:
    found = find_card(name, mib * 1024**2)
    assert (found.name if found else None) == card
    assert not found or abs(found.memory_bytes / (mib * 1024**2) - 1) < 0.07


A100, H100, T4 = known("A100", 80), known("H100", 80), known("T4", 16)


def test_gpt_3_took_3_14e23_operations() -> None:
    """arXiv:2005.14165, table D.1."""
    assert flops(GPT_3, ALL_TOKENS) == pytest.approx(3.14e23, rel=0.005)


def test_gpt_3_on_1024_a100s_takes_34_days() -> None:
    """arXiv:2104.04473, section 5.1: 140 TFLOP/s each, activations computed again."""
    plan = replace(GPT_3, checkpointing=True, data_parallel=1024, batch=1024)
    hours = compute_hours(A100, plan, replace(ALL_TOKENS, utilization=140 / 312))
    assert hours is not None
    assert hours / 24 == pytest.approx(34, rel=0.01)


def test_checkpointing_costs_a_third_more() -> None:
    again = flops(replace(GPT_3, checkpointing=True), ALL_TOKENS)
    assert again / flops(GPT_3, ALL_TOKENS) == pytest.approx(4 / 3)
    assert flops(replace(GPT_3, optimizer=""), ALL_TOKENS) == pytest.approx(2 * 175e9 * 300e9)


def test_an_h100_is_three_times_an_a100() -> None:
    a100, h100 = (compute_hours(one, GPT_3, ALL_TOKENS) for one in (A100, H100))
    assert a100 is not None
    assert h100 is not None
    assert a100 == pytest.approx(3.15e23 / (312e12 * 0.4) / 3600)
    assert a100 / h100 == pytest.approx(989 / 312)


def test_512m_tokens_at_3000_a_second_are_47_hours_and_700_dollars() -> None:
    amount = Workload(tokens=512_000_000, per_second=3000)
    hours = measured_hours(amount)
    assert hours == pytest.approx(47.4, abs=0.05)
    assert compute_hours(A100, SHAPED, amount) == hours
    assert compute_cost_usd(hours, 15, amount) == pytest.approx(700, rel=0.02)


def test_10000_requests_of_7_s_are_19_4_hours_a_day_and_17500_dollars_a_month() -> None:
    amount = Workload(requests_per_day=10_000, seconds_per_request=7)
    found = compute_load(amount, 7)
    assert found is not None
    assert found.gpu_hours_per_day == pytest.approx(19.4, abs=0.05)
    assert found.gpus == 1
    assert compute_cost_usd(found.gpu_hours_per_day, 30, amount) == pytest.approx(17_500)
    double = compute_load(Workload(requests_per_day=20_000, seconds_per_request=7), 7)
    assert double is not None
    assert double.gpus == 2


def test_70b_in_fp16_reads_its_weights_in_47_ms() -> None:
    plan = ModelPlan(params=70 * GB, precision="fp16")
    assert weight_seconds(plan, 3e12) == pytest.approx(0.047, abs=0.0005)
    assert token_seconds(plan, Workload(bandwidth_bytes_per_s=3e12), None) == weight_seconds(
        plan, 3e12
    )
    assert token_seconds(plan, Workload(), None) is None


def test_a_reply_takes_its_tokens_and_a_batch_shares_them() -> None:
    plan = ModelPlan(params=8 * GB, precision="int4")
    amount = Workload(requests_per_day=1000, reply_tokens=300)
    alone = compute_hours(A100, plan, amount)
    assert alone == pytest.approx(1000 * 300 * 4e9 / 2039e9 / 3600)
    shared = compute_hours(A100, replace(plan, batch=8), amount)
    assert alone is not None
    assert shared == pytest.approx(alone / 8)


@pytest.mark.parametrize(
    ("one", "precision", "tflops"),
    [
        (A100, "fp32", 19.5), (A100, "tf32", 156), (A100, "bf16", 312), (A100, "fp8", 312),
        (H100, "tf32", 494.5), (H100, "fp8", 1978), (H100, "int4", 989),
        (T4, "fp16", 65), (T4, "bf16", 8.1), (T4, "tf32", 8.1),
    ],
)  # fmt: skip
def test_peaks_by_precision(one: Card, precision: str, tflops: float) -> None:
    assert peak_flops(one, precision) == pytest.approx(tflops * TFLOPS)


@pytest.mark.parametrize(
    ("name", "gib", "mib"),
    [("T4", 16, 15_360), ("L4", 24, 23_034), ("A100", 40, 40_536), ("H100", 80, 81_559)],
)
def test_usable_memory_is_near_what_nvidia_smi_shows(name: str, gib: int, mib: int) -> None:
    assert usable_bytes(name, gib * GIB) == pytest.approx(mib * 1024**2, rel=0.025)
    assert usable_bytes(name, gib * GIB) < gib * GIB


def test_an_offers_own_figure_counts_where_it_is_smaller() -> None:
    assert usable_bytes("L4", 22 * GIB) == 22 * GIB
    assert usable_bytes("no such card", 10 * GIB) == int(10 * GIB * 0.98)


def test_every_gpu_has_a_row_and_the_border_is_sharp() -> None:
    border = usable_bytes("A100", 40 * GIB)
    rows = {row.gpu: row.fits for row in compare_gpus(SHAPED, Workload(), border)}
    assert rows["A100 40GB"]
    assert not rows["L4 24GB"]
    rows = {row.gpu: row.fits for row in compare_gpus(SHAPED, Workload(), border + 1)}
    assert not rows["A100 40GB"]
    assert find_smallest_gpu(border + 1) == "L40S 48GB"
    assert find_smallest_gpu(find_largest_gpu()[1] + 1) == ""


def test_old_cards_are_never_recommended() -> None:
    assert find_smallest_gpu(10**9) == "T4 16GB"
    notes = {row.gpu: row.note for row in compare_gpus(SHAPED, Workload(), 10**9)}
    assert notes["K80 12GB"] == "too old for current PyTorch"
    assert notes["T4 16GB"].startswith("no bf16")
    assert notes["H100 80GB"] == ""


def from_code(parameters: int, item_flops: int) -> ModelMeasurement:
    size = 4 * parameters
    return ModelMeasurement(
        parameters=parameters, weight_bytes=size, trained_parameters=parameters,
        trained_bytes=size, fixed_bytes=0, item_bytes=100, item_flops=item_flops,
    )  # fmt: skip


CNN = ModelPlan(
    measured=from_code(94_186, 14_000_000), precision="fp32", optimizer="adamw", batch=64
)
RESNET = ModelPlan(measured=from_code(25_557_032, 24 * GB), precision="fp32", optimizer="adamw")


@pytest.mark.parametrize(
    ("plan", "amount", "needed"),
    [
        (ModelPlan(kind="trees", rows=100_000, columns=50), Workload(), False),
        (ModelPlan(kind="tabular", rows=100_000, columns=50), Workload(), False),
        (ModelPlan(kind="trees", rows=100_000_000, columns=100), Workload(), True),
        (CNN, Workload(), False),
        (CNN, Workload(items=600_000), False),
        (CNN, Workload(items=10**9), True),
        (RESNET, Workload(), True),
        (RESNET, Workload(items=1_281_167), True),
        (SHAPED, Workload(), True),
        (ModelPlan(params=8 * GB, precision="bf16"), Workload(), True),
        (ModelPlan(params=110_000_000, precision="fp32"), Workload(), False),
        (ModelPlan(params=110_000_000), Workload(requests_per_day=10**7, reply_tokens=100), True),
    ],
)
def test_whether_a_gpu_is_needed(plan: ModelPlan, amount: Workload, needed: bool) -> None:
    said = judge_gpu(plan, amount)
    assert said.needed is needed
    assert said.why


def test_the_difference_between_rule_and_sum_is_told_largest_first() -> None:
    reasons = why_simple_differs(SHAPED, estimate_memory(SHAPED))
    assert reasons[0].startswith("activations (4.3 GB by its own rule")
    assert any("fp32 master weights (32.0 GB)" in one for one in reasons)
    assert any("overhead" in one for one in reasons)


def test_each_way_is_what_it_says() -> None:
    """Every total is what the changed options lead to, and each is smaller than now."""
    now = estimate_memory(SHAPED).total_bytes
    found = {way.options: way for way in list_suggestions(SHAPED)}
    assert {"--accumulate 8", "--checkpointing", "--batch 1", "--train adam8bit"} <= set(found)
    assert all(way.total_bytes < now for way in found.values())
    checkpointing = estimate_memory(replace(SHAPED, checkpointing=True)).total_bytes
    assert found["--checkpointing"].total_bytes == checkpointing
    assert found["--checkpointing"].fits_on == "H200 141GB"
    divided = found["--zero 3 --data-parallel 2"]
    both = estimate_memory(replace(SHAPED, zero=3, data_parallel=2)).total_bytes
    assert (divided.total_bytes, divided.gpus) == (both, 2)


def test_changes_are_put_together_where_none_alone_is_enough() -> None:
    plan = replace(SHAPED, params=11 * GB, precision="fp32", batch=16)
    alone = [way for way in list_suggestions(plan) if way.what != "together" and way.gpus == 1]
    assert not any(way.fits_on for way in alone)
    together = list_suggestions(plan)[-1]
    assert together.what == "together"
    assert together.fits_on
    assert together.options.count("--") >= 2


def test_quantising_is_what_a_model_in_use_is_told() -> None:
    found = {way.options: way for way in list_suggestions(ModelPlan(params=180 * GB))}
    assert found["--precision int4"].fits_on == "H200 141GB"
    assert found["--precision int8"].fits_on == "B200 180GB"
    assert found["--tensor-parallel 2"].gpus == 2


def test_where_nothing_helps_nothing_is_promised() -> None:
    huge = ModelPlan(params=10**15, optimizer="sgd", precision="bf16")
    assert all(not way.fits_on for way in list_suggestions(huge))
    assert not [way for way in list_suggestions(huge) if way.what == "together"]


def test_no_amount_no_hours() -> None:
    nothing: Any = Workload()
    assert compute_hours(A100, SHAPED, nothing) is None
    assert measured_hours(nothing) is None
    assert compute_load(nothing, 7) is None
    assert compute_cost_usd(None, 15, nothing) is None


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        (((1000, 0.5),), 4.0),  # by a share of the rows
        (((1000, 0.5), (2000, 0.6), (4000, 0.8)), 1.2),  # 0.4 s, and 0.1 s for each thousand
        (((1000, 1.0), (2000, 4.0), (4000, 16.0)), 64.0),  # the square of the rows
        (((500, 1.0), (1000, 2.0), (2000, 9.0), (4000, 8.0)), 16.0),  # one was interrupted
        (((1000, 0.1), (2000, 0.1), (4000, 0.1)), 0.1),
    ],
)
def test_the_time_of_a_table_from_parts_of_its_rows(
    trials: tuple[tuple[int, float], ...], expected: float
) -> None:
    fit = FitMeasurement(name="Trees", rows=8000, columns=5, trials=trials)
    assert compute_fit_seconds(fit, 8000) == pytest.approx(expected)
    plan = ModelPlan(kind="tabular", rows=8000, columns=5, optimizer="adamw", fit=fit)
    assert judge_gpu(plan, Workload()).needed is False
    slow = replace(plan, rows=8_000_000_000)
    assert judge_gpu(slow, Workload()).needed is (expected > 0.1)

"""How long the gradients of data parallelism take on a link, by the published formulas."""

from __future__ import annotations

from typing import Any

import pytest

from labctl.errors import UsageError
from labctl.estimate.cards import find_card
from labctl.estimate.compute import Workload, compute_hours, step_seconds
from labctl.estimate.plan import ModelPlan, require_consistent
from labctl.estimate.synchronization import sent_bytes, synchronization_seconds

GB = 1e9


def plan(**changes: Any) -> ModelPlan:
    """Training of 8 billion parameters: 16 GB of gradients in bf16."""
    settings: dict[str, Any] = {
        "params": 8 * 10**9, "optimizer": "adamw", "batch": 64, "seq": 2048, "hidden": 4096,
        "layers": 32, "data_parallel": 8, "link": "25gbit",
    }  # fmt: skip
    return require_consistent(ModelPlan(**{**settings, **changes}))


def test_a_ring_of_eight_sends_seven_quarters_of_the_gradients() -> None:
    assert sent_bytes(plan()) == pytest.approx(2 * 7 / 8 * 16 * GB)
    assert synchronization_seconds(plan()) == pytest.approx(28 / 3.125)
    assert sent_bytes(plan(data_parallel=2)) == pytest.approx(16 * GB)


def test_one_gpu_and_an_unknown_link_have_nothing_to_say() -> None:
    assert synchronization_seconds(plan(data_parallel=1, link="")) is None
    assert sent_bytes(plan(data_parallel=1, link="")) == 0


@pytest.mark.parametrize(("stage", "factor"), [(1, 1.0), (2, 1.0), (3, 1.5)])
def test_zero_sends_more_from_stage_3_on(stage: int, factor: float) -> None:
    assert sent_bytes(plan(zero=stage)) == pytest.approx(factor * sent_bytes(plan()))


def test_a_model_split_over_gpus_synchronizes_parts() -> None:
    assert sent_bytes(plan(tensor_parallel=4)) == pytest.approx(sent_bytes(plan()) / 4)


def test_compression() -> None:
    """Of 12 h x h weights of a layer, PowerSGD with rank 1 leaves 18 h numbers."""
    halved = sent_bytes(plan(precision="fp32", compress="fp16"))
    assert halved == pytest.approx(sent_bytes(plan(precision="fp32")) / 2)
    share = 32 * 18 * 4096 / 8e9
    assert sent_bytes(plan(compress="powersgd")) == pytest.approx(sent_bytes(plan()) * share)


def test_the_longer_of_computing_and_synchronizing_counts() -> None:
    card = find_card("NVIDIA A100-SXM4-80GB", 80 * 1024**3)
    assert card is not None
    amount = Workload(tokens=64 * 2048 * 1000)  # 1000 steps
    computed_s = step_seconds(card, plan(), amount)
    assert computed_s == pytest.approx(6 * 8e9 * 64 * 2048 / (312e12 * 0.4 * 8), rel=0.01)
    slow_s = synchronization_seconds(plan(link="1gbit"))
    assert slow_s is not None
    assert slow_s > computed_s
    hours = [compute_hours(card, plan(link=link), amount) for link in ("1gbit", "nvlink", "")]
    assert hours == pytest.approx([slow_s / 3.6, computed_s / 3.6, computed_s / 3.6])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel": 1}, "--link has nothing to synchronize"),
        ({"optimizer": ""}, "--link has nothing to synchronize"),
        ({"link": "", "compress": "powersgd"}, "--compress needs --link"),
        ({"compress": "fp16"}, "gradients in bf16 have 16 bits"),
        ({"compress": "powersgd", "hidden": 0, "layers": 0, "seq": 0}, "needs the shape"),
    ],
)
def test_options_that_say_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**changes)

"""Three ways to need less memory, and what each of them costs in time, with this run's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from labctl.estimate.cards import Card, find_card
from labctl.estimate.constants import NO_BF16
from labctl.insight.explain.curves import find_train_loss
from labctl.insight.explain.evidence import Lever, MemoryFit, RunData
from labctl.insight.explain.wording import (
    ACCUMULATE,
    AMP,
    BATCH,
    CHECKPOINTING,
    add_switch,
    build_command,
)
from labctl.text import timing_text

# A second forward pass, where a step is one forward and, twice as long, one backward pass
# (Megatron, arXiv:2104.04473, appendix).
RECOMPUTATION = 4 / 3
HALF_PRECISIONS = ("bf16", "fp16")
LEAST_TIMES = 3


def list_levers(material: RunData, batch: int, smaller: int) -> tuple[Lever, ...]:
    """List the levers for a batch that ran out; `smaller` is the batch that `next` suggests.

    0 if one of them is unknown.
    """
    return tuple(_list(material, batch, smaller)) if batch else ()


def _list(material: RunData, batch: int, smaller: int) -> Iterator[Lever]:
    fit = material.fit
    step_s = find_step_seconds(material)
    work = batch * fit.item_flops if fit else 0
    if 1 <= smaller < batch:
        parts = -(-batch // smaller)
        otherwise = f"use a batch of {smaller}, accumulated {parts} times"
        changes = {BATCH: str(smaller), ACCUMULATE: str(parts)}
        yield _make(
            f"{parts} batches of {smaller}, accumulated",
            fit,
            fit.fixed_bytes + smaller * fit.item_bytes if fit else 0,
            f"the same operations{_work_text(work)} in {parts} parts"
            + (f"; at least the {timing_text(step_s)} of a step" if step_s else ""),
            build_command(material, changes, otherwise),
        )
    checkpointed = fit.checkpointed_bytes if fit else 0
    yield _make(
        "activation checkpointing",
        fit,
        fit.fixed_bytes + checkpointed if fit and checkpointed else 0,
        f"a second forward pass{_recomputation_text(work, step_s)}",
        add_switch(material, CHECKPOINTING, "torch.utils.checkpoint.checkpoint(layer, x)"),
    )
    yield _precision(material, batch, fit)


def _precision(material: RunData, batch: int, fit: MemoryFit | None) -> Lever:
    precision = fit.precision if fit else ""
    if precision in HALF_PRECISIONS:
        total = fit.fixed_bytes + batch * fit.item_bytes if fit else 0
        return _make("lower precision", fit, total, f"none left: it computes in {precision}", "")
    total = fit.fixed_bytes + batch * fit.item_bytes // 2 if fit else 0
    card = _find_card(material)
    # Without bf16 in hardware, a GPU has fp16, which needs a scaled loss.
    half = "fp16" if card and card.name in NO_BF16 else "bf16"
    otherwise = "torch.autocast(device, torch.bfloat16)"
    if half == "fp16":
        otherwise = "torch.autocast('cuda', torch.float16), with torch.amp.GradScaler"
    wish = build_command(material, {AMP: half}, otherwise)
    return _make(f"{half} by autocast", fit, total, _speed_text(card), wish)


def _make(name: str, fit: MemoryFit | None, total: int, price: str, next_: str) -> Lever:
    fits = total <= fit.limit_bytes if fit and total else None
    return Lever(name=name, total_bytes=total, fits=fits, price=price, next=next_)


def find_step_seconds(material: RunData) -> float | None:
    """Compute the median seconds of a step from the training's own curve; None if it has none."""
    curve = find_train_loss(material.scalars)
    if curve is None or len(curve.steps) < LEAST_TIMES:
        return None
    points = zip(curve.steps, curve.times, strict=True)
    paces = [
        (later - earlier) / (second - first)
        for (first, earlier), (second, later) in pairwise(points)
        if second > first and later > earlier
    ]
    return median(paces) if paces else None


def _find_card(material: RunData) -> Card | None:
    for sample in reversed(material.samples):
        for gpu in sample.gpus:
            return find_card(gpu.name, gpu.memory_total_bytes or 0)
    return None


def _work_text(work: float) -> str:
    return f" ({work:.2g} a step)" if work else ""


def _recomputation_text(work: float, step_s: float | None) -> str:
    if step_s:
        return (
            f": a step of {timing_text(step_s)} takes about {timing_text(step_s * RECOMPUTATION)}"
        )
    if work:
        return f": {work * RECOMPUTATION:.2g} operations a step instead of {work:.2g}"
    return ": a third more time"


def _speed_text(card: Card | None) -> str:
    if card is None:
        return "none on a GPU with tensor cores; on a CPU it is often slower"
    if card.fp16_tflops <= card.fp32_tflops:
        return f"none, and no gain: the {card.name} computes it as fast as fp32"
    gain = card.fp16_tflops / card.fp32_tflops
    return f"none: products are up to {gain:.0f} times as fast on the {card.name}"

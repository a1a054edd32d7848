"""Which GPUs hold it."""

from __future__ import annotations

from labctl.estimate.cards import CARDS, GIB, NOMINAL, Card, card
from labctl.estimate.compute import Amount, hours_on, token_seconds
from labctl.estimate.constants import NO_BF16, OLD_CARDS, SOFT_ECC, SOFT_ECC_SHARE
from labctl.estimate.plan import Plan
from labctl.model import Value


class Fit(Value, frozen=True):
    """One kind of GPU. `share` is how much of what it can really give is taken (1.0: all).

    `current` is False where today's PyTorch leaves the card out. `hours` is on as many of them as
    the plan has GPUs; None where the amount of work is not known.
    """

    gpu: str
    memory_bytes: int
    usable_bytes: int
    fits: bool
    share: float
    hours: float | None = None
    seconds_per_token: float | None = None
    current: bool = True
    note: str = ""


def usable_bytes(name: str, memory_bytes: int) -> int:
    """What is left of a GPU's memory as printed on the box, or as its provider tells it."""
    known = card(name, memory_bytes)
    printed = known.memory_bytes if known else memory_bytes
    kept = SOFT_ECC_SHARE if known and known.name in SOFT_ECC else 1 - NOMINAL
    return min(memory_bytes, int(printed * kept)) if known else int(memory_bytes * kept)


def label(one: Card) -> str:
    return f"{one.name} {one.memory_bytes // GIB}GB"


def fits(plan: Plan, amount: Amount, total_bytes: int) -> tuple[Fit, ...]:
    """A row for each kind of GPU whose figures are known, the smallest first."""
    ordered = sorted(CARDS, key=lambda one: (one.memory_bytes, one.fp16_tflops))
    return tuple(_fit(one, plan, amount, total_bytes) for one in ordered)


def _fit(one: Card, plan: Plan, amount: Amount, total_bytes: int) -> Fit:
    usable = usable_bytes(one.name, one.memory_bytes)
    fit = total_bytes <= usable
    slow = plan.precision in ("bf16", "tf32") and one.name in NO_BF16
    note = f"no {plan.precision}: as slow as fp32" if slow else ""
    return Fit(
        gpu=label(one),
        memory_bytes=one.memory_bytes,
        usable_bytes=usable,
        fits=fit,
        share=total_bytes / usable,
        hours=hours_on(one, plan, amount),
        seconds_per_token=token_seconds(plan, amount, one),
        current=one.name not in OLD_CARDS,
        note="too old for current PyTorch" if one.name in OLD_CARDS else note,
    )


def largest_usable() -> tuple[str, int]:
    """The GPU that holds most, and how much."""
    best = max(CARDS, key=lambda one: usable_bytes(one.name, one.memory_bytes))
    return label(best), usable_bytes(best.name, best.memory_bytes)


def smallest_for(total_bytes: int) -> str:
    """The smallest GPU that holds it; "" where none does."""
    ordered = sorted(CARDS, key=lambda one: (one.memory_bytes, one.fp16_tflops))
    current = (one for one in ordered if one.name not in OLD_CARDS)
    found = (one for one in current if total_bytes <= usable_bytes(one.name, one.memory_bytes))
    return next((label(one) for one in found), "")

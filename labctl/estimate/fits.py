"""Which GPUs have enough memory for a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labctl.estimate.cards import CARDS, GIB, NOMINAL, Card, find_card, plain_name
from labctl.estimate.compute import Workload, compute_hours, token_seconds
from labctl.estimate.constants import NO_BF16, OLD_CARDS, SOFT_ECC, SOFT_ECC_SHARE
from labctl.estimate.plan import ModelPlan
from labctl.model import GpuNeed, Value


class GpuFit(Value, frozen=True):
    """One GPU type. `share` is the used share of its usable memory (1.0: all of it).

    `current` is False if current PyTorch does not support it. `hours` is for as many of them as the
    plan has GPUs; None if the amount of work is unknown.
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
    """Return the usable part of a GPU's memory, given its nominal or reported size."""
    listed = find_card(name, memory_bytes)
    nominal = listed.memory_bytes if listed else memory_bytes
    share = SOFT_ECC_SHARE if listed and listed.name in SOFT_ECC else 1 - NOMINAL
    return min(memory_bytes, int(nominal * share)) if listed else int(memory_bytes * share)


def label(gpu: Card) -> str:
    """Return a GPU's name with its memory size, such as `A100 80GB`."""
    return f"{gpu.name} {gpu.memory_bytes // GIB}GB"


def select_cards(gpu: GpuNeed) -> tuple[Card, ...]:
    """Return the listed GPU types that `gpu` allows, the smallest first.

    A model that is not listed, and a need without a GPU, select all types.
    """
    cards = _sort_by_size(CARDS)
    if gpu.kind in ("auto", "any", "none"):
        allowed = [card for card in cards if card.memory_bytes >= gpu.min_memory_bytes]
    else:
        allowed = [card for card in cards if plain_name(card.name) == plain_name(gpu.kind)]
    return tuple(allowed or cards)


def compare_gpus(
    plan: ModelPlan,
    amount: Workload,
    total_bytes: int,
    cards: Sequence[Card] = CARDS,
) -> tuple[GpuFit, ...]:
    """Compare a plan with each of these GPU types, the smallest first."""
    return tuple(_fit(gpu, plan, amount, total_bytes) for gpu in _sort_by_size(cards))


def _sort_by_size(cards: Iterable[Card]) -> list[Card]:
    return sorted(cards, key=lambda card: (card.memory_bytes, card.fp16_tflops))


def _fit(gpu: Card, plan: ModelPlan, amount: Workload, total_bytes: int) -> GpuFit:
    usable = usable_bytes(gpu.name, gpu.memory_bytes)
    fit = total_bytes <= usable
    slow = plan.precision in ("bf16", "tf32") and gpu.name in NO_BF16
    note = f"no {plan.precision} support: as slow as fp32" if slow else ""
    return GpuFit(
        gpu=label(gpu),
        memory_bytes=gpu.memory_bytes,
        usable_bytes=usable,
        fits=fit,
        share=total_bytes / usable,
        hours=compute_hours(gpu, plan, amount),
        seconds_per_token=token_seconds(plan, amount, gpu),
        current=gpu.name not in OLD_CARDS,
        note="too old for current PyTorch" if gpu.name in OLD_CARDS else note,
    )


def find_largest_gpu() -> tuple[str, int]:
    """Return the GPU with the most usable memory, and its bytes."""
    best = max(CARDS, key=lambda gpu: usable_bytes(gpu.name, gpu.memory_bytes))
    return label(best), usable_bytes(best.name, best.memory_bytes)


def find_smallest_gpu(total_bytes: int, cards: Sequence[Card] = CARDS) -> str:
    """Return the smallest of `cards` with enough memory; "" if none has."""
    current = (gpu for gpu in _sort_by_size(cards) if gpu.name not in OLD_CARDS)
    large_enough = (
        gpu for gpu in current if total_bytes <= usable_bytes(gpu.name, gpu.memory_bytes)
    )
    return next((label(gpu) for gpu in large_enough), "")

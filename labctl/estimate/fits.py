"""Which GPUs have enough memory for a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labctl.estimate.cards import CARDS, GIB, NOMINAL, RENTABLE, Card, find_card, plain_name
from labctl.estimate.compute import Workload, compute_hours, token_seconds
from labctl.estimate.constants import NO_BF16, OLD_CARDS, SOFT_ECC, SOFT_ECC_SHARE
from labctl.estimate.plan import ModelPlan
from labctl.model import GpuNeed, Value

# the GPU whose time is shown if a model fits on none
YARDSTICK = "H100"


class GpuFit(Value, frozen=True):
    """One GPU type. `share` is the used share of its usable memory (1.0: all of it).

    `current` is False if current PyTorch does not support it, `rentable` if labctl cannot get it.
    `hours` is for as many of them as the plan has GPUs; None if the amount of work is unknown.
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
    rentable: bool = True


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
    return GpuFit(
        gpu=label(gpu),
        memory_bytes=gpu.memory_bytes,
        usable_bytes=usable,
        fits=fit,
        share=total_bytes / usable,
        hours=compute_hours(gpu, plan, amount),
        seconds_per_token=token_seconds(plan, amount, gpu),
        current=gpu.name not in OLD_CARDS,
        note=_describe_limit(gpu, plan),
        rentable=gpu.rentable,
    )


def _describe_limit(gpu: Card, plan: ModelPlan) -> str:
    if not gpu.rentable:
        return "labctl cannot rent this"
    if gpu.name in OLD_CARDS:
        return "too old for current PyTorch"
    return f"no {plan.precision} support: as slow as fp32" if _is_slow(gpu, plan) else ""


def choose_card(
    plan: ModelPlan, total_bytes: int, gpu: GpuNeed, offered: Card | None
) -> tuple[Card, str]:
    """Choose the GPU that a person would take, and say why: the `offered` one, if any.

    Without prices it is the smallest that fits and computes in the plan's number format at its full
    speed, among those that the lab asks for. If none fits, it is the largest of them up to a
    YARDSTICK.
    """
    if offered is not None:
        return offered, "in the cheapest offer"
    cards = select_cards(gpu)
    cards = tuple(card for card in cards if card.rentable) or cards
    fits = [card for card in cards if total_bytes <= usable_bytes(card.name, card.memory_bytes)]
    current = [card for card in fits if card.name not in OLD_CARDS]
    fast = [card for card in current if not _is_slow(card, plan)]
    names = {card.name for card in cards}
    scope = names.pop() if len(names) == 1 else "GPU"
    if not current:
        card = next((card for card in cards if card.name == YARDSTICK), cards[-1])
        return card, "if it had enough memory"
    if fast and fast[0] != current[0]:
        return fast[0], f"the smallest {scope} that fits and supports {plan.precision}"
    return (fast or current)[0], f"the smallest {scope} that fits"


def _is_slow(card: Card, plan: ModelPlan) -> bool:
    """Whether the card computes in the plan's number format only as fast as in fp32."""
    return plan.precision in ("bf16", "tf32") and card.name in NO_BF16


def find_largest_gpu() -> tuple[str, int]:
    """Return the GPU with the most usable memory that labctl can rent, and its bytes."""
    best = max(RENTABLE, key=lambda gpu: usable_bytes(gpu.name, gpu.memory_bytes))
    return label(best), usable_bytes(best.name, best.memory_bytes)


def find_smallest_gpu(total_bytes: int, cards: Sequence[Card] = RENTABLE) -> str:
    """Return the smallest of `cards` with enough memory; "" if none has."""
    current = (gpu for gpu in _sort_by_size(cards) if gpu.name not in OLD_CARDS)
    large_enough = (
        gpu for gpu in current if total_bytes <= usable_bytes(gpu.name, gpu.memory_bytes)
    )
    return next((label(gpu) for gpu in large_enough), "")

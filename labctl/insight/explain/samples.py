"""Telemetry as the rules ask of it: medians and rates of the time when the run was at work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median

from labctl.insight.telemetry import GpuSample, Sample
from labctl.model import Value

# Imports, downloads and the first batches are no measure of a training...
START_S = 60.0
# ...but of a short run they must not be all that is left.
START_SHARE = 0.2
# Fewer samples than this prove nothing.
LEAST = 3
# Between two samples: beyond it nobody measured, and no rate is taken.
LONGEST_GAP_S = 180.0


class Card(Value, frozen=True):
    """One GPU over the settled time. Medians; None where the card does not tell."""

    name: str
    uuid: str
    count: int
    use_percent: float | None
    power_w: float | None
    power_limit_w: float | None
    memory_share: float | None
    memory_total_bytes: int | None
    temperature_c: float | None
    clock_share: float | None
    throttled: dict[str, float]


def settled(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples without each attempt's start."""
    kept: list[Sample] = []
    for attempt in sorted({one.attempt for one in samples}):
        own = [one for one in samples if one.attempt == attempt]
        span_s = own[-1].at - own[0].at
        begin = own[0].at + min(START_S, START_SHARE * span_s)
        kept += [one for one in own if one.at >= begin]
    return tuple(kept)


def span_s(samples: Sequence[Sample]) -> float:
    return max(0.0, samples[-1].at - samples[0].at) if samples else 0.0


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what was measured; None where that is too little."""
    known = [one for one in values if one is not None]
    return median(known) if len(known) >= LEAST else None


def cards(samples: Sequence[Sample]) -> tuple[Card, ...]:
    """Every GPU that was seen often enough, in the order of first sight."""
    seen: dict[str, list[GpuSample]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            seen.setdefault(gpu.uuid, []).append(gpu)
    return tuple(_card(own) for own in seen.values() if len(own) >= LEAST)


def _card(own: Sequence[GpuSample]) -> Card:
    reasons = {reason for one in own for reason in one.throttle}
    totals = [one.memory_total_bytes for one in own if one.memory_total_bytes]
    return Card(
        name=own[-1].name or "GPU",
        uuid=own[-1].uuid,
        count=len(own),
        use_percent=middle(one.use_percent for one in own),
        power_w=middle(one.power_w for one in own),
        power_limit_w=middle(one.power_limit_w for one in own),
        memory_share=middle(_share(one.memory_bytes, one.memory_total_bytes) for one in own),
        memory_total_bytes=totals[-1] if totals else None,
        temperature_c=middle(one.temperature_c for one in own),
        clock_share=middle(_share(one.sm_clock_mhz, one.sm_clock_max_mhz) for one in own),
        throttled={
            reason: sum(reason in one.throttle for one in own) / len(own)
            for reason in sorted(reasons)
        },
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def processor_share(samples: Sequence[Sample]) -> float | None:
    """Busy cores as a share of those it may use."""
    return middle(_share(one.cpu_cores, one.cores) for one in samples)


def cores(samples: Sequence[Sample]) -> float | None:
    return next((one.cores for one in reversed(samples) if one.cores), None)


def rate(samples: Sequence[Sample], total: Callable[[Sample], int | None]) -> float | None:
    """Bytes a second of a counter, where it was counted without a gap or a new beginning."""
    size = seconds = 0.0
    for before, after in pairwise(samples):
        first, last = total(before), total(after)
        took_s = after.at - before.at
        if before.attempt != after.attempt or first is None or last is None:
            continue
        if 0 < took_s <= LONGEST_GAP_S and last >= first:
            size, seconds = size + last - first, seconds + took_s
    return size / seconds if seconds else None


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(rise per unit, share of the variance that a straight line explains) by least squares."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread_x = sum((x - mean_x) ** 2 for x, _ in points)
    spread_y = sum((y - mean_y) ** 2 for _, y in points)
    if not spread_x or not spread_y:
        return 0.0, 0.0
    both = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return both / spread_x, both**2 / (spread_x * spread_y)

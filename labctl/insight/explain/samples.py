"""Medians and rates of telemetry over the time after the start of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median

from labctl.insight.telemetry import GpuSample, Sample
from labctl.model import Value

# Imports, downloads and the first batches are not typical of a training, so they are left out...
START_S = 60.0
# ...up to this share of a short run.
START_SHARE = 0.2
# Fewer samples than this are not enough.
LEAST = 3
# Seconds between two samples. Over a longer gap, no rate is computed.
LONGEST_GAP_S = 180.0


class GpuSummary(Value, frozen=True):
    """Medians of one GPU after the start; None for what the GPU does not report."""

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


def drop_start(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the samples without each attempt's start."""
    kept: list[Sample] = []
    for attempt in sorted({sample.attempt for sample in samples}):
        of_attempt = [sample for sample in samples if sample.attempt == attempt]
        span_s = of_attempt[-1].at - of_attempt[0].at
        begin = of_attempt[0].at + min(START_S, START_SHARE * span_s)
        kept += [sample for sample in of_attempt if sample.at >= begin]
    return tuple(kept)


def span_s(samples: Sequence[Sample]) -> float:
    """Return the seconds between the first and the last sample."""
    return max(0.0, samples[-1].at - samples[0].at) if samples else 0.0


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the measured values; None with fewer than LEAST of them."""
    measured = [value for value in values if value is not None]
    return median(measured) if len(measured) >= LEAST else None


def summarize_gpus(samples: Sequence[Sample]) -> tuple[GpuSummary, ...]:
    """Summarize every GPU that has enough samples, in the order of first appearance."""
    by_uuid: dict[str, list[GpuSample]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            by_uuid.setdefault(gpu.uuid, []).append(gpu)
    return tuple(_summarize(gpus) for gpus in by_uuid.values() if len(gpus) >= LEAST)


def _summarize(samples: Sequence[GpuSample]) -> GpuSummary:
    reasons = {reason for sample in samples for reason in sample.throttle}
    totals = [sample.memory_total_bytes for sample in samples if sample.memory_total_bytes]
    return GpuSummary(
        name=samples[-1].name or "GPU",
        uuid=samples[-1].uuid,
        count=len(samples),
        use_percent=median_of(sample.use_percent for sample in samples),
        power_w=median_of(sample.power_w for sample in samples),
        power_limit_w=median_of(sample.power_limit_w for sample in samples),
        memory_share=median_of(
            _share(sample.memory_bytes, sample.memory_total_bytes) for sample in samples
        ),
        memory_total_bytes=totals[-1] if totals else None,
        temperature_c=median_of(sample.temperature_c for sample in samples),
        clock_share=median_of(
            _share(sample.sm_clock_mhz, sample.sm_clock_max_mhz) for sample in samples
        ),
        throttled={
            reason: sum(reason in sample.throttle for sample in samples) / len(samples)
            for reason in sorted(reasons)
        },
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def cpu_share(samples: Sequence[Sample]) -> float | None:
    """Return busy CPU cores as a share of those that the run may use."""
    return median_of(_share(sample.cpu_cores, sample.cores) for sample in samples)


def cores(samples: Sequence[Sample]) -> float | None:
    """Return the number of CPU cores that the run may use, as last reported."""
    return next((sample.cores for sample in reversed(samples) if sample.cores), None)


def byte_rate(samples: Sequence[Sample], total: Callable[[Sample], int | None]) -> float | None:
    """Return a counter's bytes per second, without gaps and restarts of the counter."""
    size = seconds = 0.0
    for before, after in pairwise(samples):
        first, last = total(before), total(after)
        took_s = after.at - before.at
        if before.attempt != after.attempt or first is None or last is None:
            continue
        if 0 < took_s <= LONGEST_GAP_S and last >= first:
            size, seconds = size + last - first, seconds + took_s
    return size / seconds if seconds else None


def fit_slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line by least squares; return (rise per unit, share of the variance explained)."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread_x = sum((x - mean_x) ** 2 for x, _ in points)
    spread_y = sum((y - mean_y) ** 2 for _, y in points)
    if not spread_x or not spread_y:
        return 0.0, 0.0
    both = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return both / spread_x, both**2 / (spread_x * spread_y)

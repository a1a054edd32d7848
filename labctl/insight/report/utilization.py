"""Summarize a run's use of its server, from telemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labctl.insight.report.curves import gpu_use
from labctl.insight.telemetry import GpuSample, Sample
from labctl.model import Value

# A sample covers the time since the previous one, but at most this: the server takes a sample every
# 10 s, after six hours once a minute.
LONGEST_GAP_S = 130.0
JOULES_PER_WH = 3600.0


class Utilization(Value, frozen=True):
    """Means over the measured time, None where not measured. Percent, watts, bytes, cores.

    `energy_wh` is the growth of the GPUs' own counters; `energy_estimate_wh` is power times time,
    for GPUs without a counter.
    """

    samples: int = 0
    measured_s: float = 0.0
    gpus: tuple[str, ...] = ()
    gpu_use_percent: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_memory_total_bytes: float | None = None
    gpu_power_w: float | None = None
    energy_wh: float | None = None
    energy_estimate_wh: float | None = None
    cpu_cores: float | None = None
    cores: float | None = None
    memory_bytes: float | None = None
    memory_limit_bytes: float | None = None
    throttled: tuple[str, ...] = ()


def summarize_utilization(samples: Sequence[Sample]) -> Utilization:
    """Summarize the samples, each weighted by the time that it covers."""
    weights = _compute_sample_spans_s(samples)
    joules, estimate = _sum_metered_energy_j(samples), _sum_estimated_j(samples, weights)
    cards = [gpu for sample in samples for gpu in sample.gpus]
    return Utilization(
        samples=len(samples),
        measured_s=sum(weights),
        gpus=tuple(sorted({gpu.name for gpu in cards if gpu.name})),
        gpu_use_percent=_mean(samples, weights, gpu_use),
        gpu_memory_bytes=_peak(samples, lambda s: _sum(s, lambda g: g.memory_bytes)),
        gpu_memory_total_bytes=_peak(samples, lambda s: _sum(s, lambda g: g.memory_total_bytes)),
        gpu_power_w=_mean(samples, weights, lambda s: _sum(s, lambda g: g.power_w)),
        energy_wh=None if joules is None else joules / JOULES_PER_WH,
        energy_estimate_wh=None if estimate is None else estimate / JOULES_PER_WH,
        cpu_cores=_mean(samples, weights, lambda s: s.cpu_cores),
        cores=_peak(samples, lambda s: s.cores),
        memory_bytes=_peak(samples, lambda s: s.memory_bytes),
        memory_limit_bytes=_peak(samples, lambda s: s.memory_limit_bytes),
        throttled=tuple(sorted({why for gpu in cards for why in gpu.throttle})),
    )


def _compute_sample_spans_s(samples: Sequence[Sample]) -> list[float]:
    """Return the seconds since each previous sample, the time that most values cover."""
    weights = []
    for before, sample in zip((None, *samples), samples, strict=False):
        same = before is not None and before.attempt == sample.attempt
        gap_s = sample.at - before.at if before and same else 0.0
        weights.append(gap_s if 0 < gap_s <= LONGEST_GAP_S else 0.0)
    return weights


def _mean(
    samples: Sequence[Sample], weights: Sequence[float], read: Callable[[Sample], float | None]
) -> float | None:
    measured = [
        (value, weight)
        for sample, weight in zip(samples, weights, strict=True)
        if (value := read(sample)) is not None
    ]
    total = sum(weight for _, weight in measured)
    if not measured:
        return None
    if total <= 0:
        return sum(value for value, _ in measured) / len(measured)
    return sum(value * weight for value, weight in measured) / total


def _peak(samples: Sequence[Sample], read: Callable[[Sample], float | None]) -> float | None:
    return max((value for sample in samples if (value := read(sample)) is not None), default=None)


def _sum(sample: Sample, read: Callable[[GpuSample], float | None]) -> float | None:
    measured = [value for gpu in sample.gpus if (value := read(gpu)) is not None]
    return sum(measured) if measured else None


def _sum_metered_energy_j(samples: Sequence[Sample]) -> float | None:
    """Sum the growth of the GPUs' energy counters. One that fell was reset by a server restart."""
    last: dict[tuple[int, str], float] = {}
    total, grown = 0.0, False
    for sample in samples:
        for gpu in sample.gpus:
            if gpu.energy_j is None:
                continue
            key = (sample.attempt, gpu.uuid)
            if key in last:
                total, grown = total + max(0.0, gpu.energy_j - last[key]), True
            last[key] = gpu.energy_j
    return total if grown else None


def _sum_estimated_j(samples: Sequence[Sample], weights: Sequence[float]) -> float | None:
    known = [
        power * weight
        for sample, weight in zip(samples, weights, strict=True)
        if weight and (power := _sum(sample, lambda gpu: gpu.power_w)) is not None
    ]
    return sum(known) if known else None

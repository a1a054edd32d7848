"""Charts of what a run logged, training and validation together, and of the server's telemetry."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from statistics import median

from labctl.insight.report.charts import Chart, Curve, draw_chart
from labctl.insight.report.facts import ReportFacts
from labctl.insight.report.formatting import SPACE, count, number
from labctl.insight.scalars import HELD_OUT, TRAINING, Series, split_words
from labctl.insight.telemetry import GpuSample, Sample

MOST_CHARTS = 12
MOST_SETTINGS = 12
# The most important metrics, drawn first.
FIRST = ("accuracy", "acc", "top1", "f1", "iou", "auc", "loss")
SHARES = re.compile(r"(^|_)(accuracy|acc|precision|recall|f1|auc|iou|dice|share|top\d)($|_)")
UNITS = {"seconds": "s", "_ms": "ms", "bytes": "bytes", "percent": "%"}
# A pause of more than this many usual intervals interrupts a line of telemetry.
GAP = 3.0
LEAST_SAMPLES = 3
GIB = 1024**3


def draw_logged(facts: ReportFacts) -> tuple[tuple[Chart, ...], str]:
    """Draw a chart for each logged metric; return them, and a note on what is not drawn.

    That is settings, which were logged once (a batch size), and charts beyond MOST_CHARTS.
    """
    groups: dict[str, list[Series]] = {}
    for series in facts.scalars.series:
        groups.setdefault(metric_name(series.tag), []).append(series)
    names = sorted(groups, key=lambda name: (metric_priority(name), name))
    once = [name for name in names if _is_setting(name, groups[name])]
    drawn = [name for name in names if name not in once]
    shown = drawn[:MOST_CHARTS]
    charts = tuple(_draw_metric(name, groups[name], facts.chosen_step) for name in shown)
    settings = [
        f"{metric_title(name).lower()}{SPACE}{number(groups[name][0].values[0])}" for name in once
    ]
    notes = [f"Logged once: {', '.join(settings[:MOST_SETTINGS])}."] if once else []
    left = len(drawn) - len(shown) + max(0, len(settings) - MOST_SETTINGS)
    notes += [f"{count(left, 'more logged value')} are not drawn."] if left else []
    return charts, " ".join(notes)


def _is_setting(name: str, group: Sequence[Series]) -> bool:
    """Whether it was logged only once and is not one of the most important metrics."""
    return not is_result(name) and len(group) == 1 and len(group[0].values) == 1


def is_result(name: str) -> bool:
    """Whether a metric is one of the most important ones, such as an accuracy or a loss."""
    return metric_priority(name) < len(FIRST)


def metric_name(tag: str) -> str:
    """Return the metric of a tag without its data set: train/loss and val_loss are both loss."""
    last = tag.rpartition("/")[2]
    bare = re.sub(r"^(train|training|val|valid|validation|eval|test|epoch)_", "", last)
    return bare or last


def metric_priority(name: str) -> int:
    words = name.lower().split("_")
    return next((index for index, word in enumerate(FIRST) if word in words), len(FIRST))


def _draw_metric(name: str, group: Sequence[Series], chosen: int | None) -> Chart:
    share = bool(SHARES.search(name.lower())) and all(
        -1e-9 <= value <= 1 + 1e-9 for series in group for value in series.values if value == value
    )
    curves = [
        Curve(
            label=_label(series.tag, len(group)),
            xs=tuple(map(float, series.steps)),
            ys=series.values,
            main=bool(split_words(series.tag) & HELD_OUT) or len(group) == 1,
        )
        for series in sorted(group, key=lambda series: series.tag)
    ]
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    mark = (float(chosen), f"chosen, step{SPACE}{chosen:,}") if chosen is not None else None
    return draw_chart(
        name,
        metric_title(name),
        curves,
        unit=unit,
        share=share,
        mark=mark,
        high=1.0 if share else None,
    )


def metric_title(name: str) -> str:
    return name.replace("_", " ").strip().capitalize()[:80]


def _label(tag: str, members: int) -> str:
    names = split_words(tag)
    if names & HELD_OUT:
        return "test" if "test" in names else "validation"
    if names & TRAINING:
        return "training"
    return "" if members == 1 else tag[:40]


def draw_telemetry(samples: Sequence[Sample]) -> tuple[Chart, ...]:
    """Draw the server's telemetry over the run's time; empty with too few samples."""
    if len(samples) < LEAST_SAMPLES:
        return ()
    scale, unit = _time_scale(samples[-1].at - samples[0].at)
    pauses = [b.at - a.at for a, b in itertools.pairwise(samples)]
    longest = GAP * max(median(pauses), 1.0)

    def over_time(
        name: str, title: str, unit_: str, read: Callable[[Sample], float | None]
    ) -> Chart:
        xs: list[float] = []
        ys: list[float | None] = []
        for before, sample in zip((None, *samples), samples, strict=False):
            at = (sample.at - samples[0].at) / scale
            if before and (sample.at - before.at > longest or sample.attempt != before.attempt):
                xs.append(at)
                ys.append(None)
            xs.append(at)
            ys.append(read(sample))
        curve = Curve(label="", xs=tuple(xs), ys=tuple(ys))
        return draw_chart(name, title, [curve], unit=unit_, x_title=unit, low=0.0)

    drawn = [
        over_time("gpu-use", "GPU busy", "%", gpu_use),
        over_time("gpu-memory", "GPU memory", "GiB", lambda s: _gib(_gpus(s, _memory, sum))),
        over_time("gpu-power", "GPU power", "W", lambda s: _gpus(s, _power, sum)),
        over_time("cpu", "CPU", "cores busy", lambda s: s.cpu_cores),
        over_time("memory", "Memory", "GiB", lambda s: _gib(s.memory_bytes)),
    ]
    return tuple(sample for sample in drawn if sample.lines)


def gpu_use(sample: Sample) -> float | None:
    """Return the mean utilization of the run's GPUs, in percent."""
    return _gpus(sample, lambda gpu: gpu.use_percent, lambda known: sum(known) / len(known))


def _gpus(
    sample: Sample,
    read: Callable[[GpuSample], float | None],
    together: Callable[[list[float]], float],
) -> float | None:
    known = [value for gpu in sample.gpus if (value := read(gpu)) is not None]
    return together(known) if known else None


def _memory(gpu: GpuSample) -> float | None:
    return gpu.memory_bytes


def _power(gpu: GpuSample) -> float | None:
    return gpu.power_w


def _gib(value: float | None) -> float | None:
    return None if value is None else value / GIB


def _time_scale(length_s: float) -> tuple[float, str]:
    if length_s < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if length_s < 3 * 3600 else (3600.0, "hours")

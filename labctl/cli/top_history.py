"""Samples that `top` has received: the last minutes of each figure and the pace of the runs."""

from __future__ import annotations

from collections import deque

from labctl.insight.top import ContainerMetrics, ServerMetrics

# samples of each figure: five minutes at one per second
KEPT = 300
# least time between two steps from which a pace is computed
LEAST_SPAN_S = 5.0
# without the full block, which would touch the row above
BARS = "▁▂▃▄▅▆▇"
PLAIN_BARS = "_.-=+*#"


class History:
    """The latest sample, and the figures of the samples before it by name."""

    def __init__(self) -> None:
        self.now: ServerMetrics | None = None
        self._figures: dict[str, deque[float | None]] = {}
        self._steps: dict[str, deque[tuple[float, float]]] = {}

    def add(self, now: ServerMetrics) -> None:
        self.now = now
        figures = {
            "cpu": now.cpu_cores,
            "memory": now.memory_bytes,
            "disk": _sum(now.disk_read_bytes_per_s, now.disk_write_bytes_per_s),
            "network": _sum(now.net_in_bytes_per_s, now.net_out_bytes_per_s),
            **{f"gpu {gpu.index}": gpu.use_percent for gpu in now.gpus},
            **{f"gpu memory {gpu.index}": gpu.memory_bytes for gpu in now.gpus},
        }
        for name, figure in figures.items():
            self._figures.setdefault(name, deque(maxlen=KEPT)).append(figure)
        for run in now.runs:
            self._note_steps(now.at, run)

    def add_gap(self) -> None:
        """Add a gap: no sample arrived for a while."""
        for figures in self._figures.values():
            figures.append(None)

    @property
    def is_single_sample(self) -> bool:
        """Whether there is only one sample, which is too little for a bar chart."""
        return len(self._figures.get("cpu", ())) < 2

    def _note_steps(self, at: float, run: ContainerMetrics) -> None:
        if run.step is None:
            return
        steps = self._steps.setdefault(run.name, deque(maxlen=KEPT))
        if steps and run.step < steps[-1][1]:
            steps.clear()  # it went back to a checkpoint
        if not steps or run.step > steps[-1][1]:
            steps.append((at, run.step))

    def estimate_left_s(self, run: ContainerMetrics) -> float | None:
        """Return the seconds left at the run's pace since the view began; None if unknown."""
        steps = self._steps.get(run.name)
        if not steps or not run.total_steps:
            return None
        (first_at, first), (last_at, last) = steps[0], steps[-1]
        if last_at - first_at < LEAST_SPAN_S:
            return None
        return max(0.0, run.total_steps - last) * (last_at - first_at) / (last - first)

    def find_highest(self, name: str, width: int) -> float | None:
        """Return the largest of the last `width` figures; None without any."""
        figures = list(self._figures.get(name, ()))[-width:]
        return max((figure for figure in figures if figure is not None), default=None)

    def render_line(
        self, name: str, width: int, most: float | None = None, bars: str = BARS
    ) -> str:
        """Render the last `width` figures as bars, relative to `most` or to their own maximum."""
        figures = list(self._figures.get(name, ()))
        return render_sparkline(figures[-width:] if width else [], width, most, bars)


def render_sparkline(
    figures: list[float | None], width: int, most: float | None = None, bars: str = BARS
) -> str:
    """Render one bar per figure, aligned to the right, with gaps for None.

    Bars are relative to `most`, or to the largest figure.
    """
    top = most or max((figure for figure in figures if figure is not None), default=0.0)

    def render_bar(figure: float | None) -> str:
        if figure is None:
            return " "
        share = min(1.0, max(0.0, figure / top)) if top else 0.0
        return bars[min(len(bars) - 1, int(share * len(bars)))]

    return "".join(map(render_bar, figures)).rjust(width)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other

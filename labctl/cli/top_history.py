"""What `top` has seen so far: the last minutes of each figure, and how fast the runs go on."""

from __future__ import annotations

from collections import deque

from labctl.insight.top import RunNow, ServerNow

# Samples: five minutes at one a second.
KEPT = 300
LEAST_SPAN_S = 5.0
# Without the full block, which would touch the row above.
BARS = "▁▂▃▄▅▆▇"
PLAIN_BARS = "_.-=+*#"


class History:
    """The latest sample, and the ones before it as figures by name."""

    def __init__(self) -> None:
        self.now: ServerNow | None = None
        self._figures: dict[str, deque[float | None]] = {}
        self._steps: dict[str, deque[tuple[float, float]]] = {}

    def add(self, now: ServerNow) -> None:
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

    def gap(self) -> None:
        """That nothing was heard for a while."""
        for figures in self._figures.values():
            figures.append(None)

    @property
    def single(self) -> bool:
        """Whether there is but one sample: nothing to draw a line of."""
        return len(self._figures.get("cpu", ())) < 2

    def _note_steps(self, at: float, run: RunNow) -> None:
        if run.step is None:
            return
        known = self._steps.setdefault(run.name, deque(maxlen=KEPT))
        if known and run.step < known[-1][1]:
            known.clear()  # it went back to a checkpoint
        if not known or run.step > known[-1][1]:
            known.append((at, run.step))

    def left_s(self, run: RunNow) -> float | None:
        """How long the run still takes at the pace seen here; None where it was not seen to go."""
        known = self._steps.get(run.name)
        if not known or not run.total_steps:
            return None
        (first_at, first), (last_at, last) = known[0], known[-1]
        if last_at - first_at < LEAST_SPAN_S:
            return None
        return max(0.0, run.total_steps - last) * (last_at - first_at) / (last - first)

    def line(self, name: str, width: int, most: float | None = None, bars: str = BARS) -> str:
        """The last `width` figures as bars below `most`, or below their own highest."""
        known = list(self._figures.get(name, ()))
        return sparkline(known[-width:] if width else [], width, most, bars)


def sparkline(
    figures: list[float | None], width: int, most: float | None = None, bars: str = BARS
) -> str:
    """One bar a figure, to the right; a gap where nothing was measured."""
    top = most or max((figure for figure in figures if figure is not None), default=0.0)

    def bar(figure: float | None) -> str:
        if figure is None:
            return " "
        share = min(1.0, max(0.0, figure / top)) if top else 0.0
        return bars[min(len(bars) - 1, int(share * len(bars)))]

    return "".join(map(bar, figures)).rjust(width)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other

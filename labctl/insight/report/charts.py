"""Where a chart's lines, ticks and labels go. Positions are percent of the plot, y from its top.

Lines are SVG paths in a square of 1000 units that the page stretches; all else stays its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from labctl.insight.report.formatting import SPACE, bare_percent, number, percent
from labctl.model import Value

MOST_POINTS = 500
MOST_LINES = 4
# Two labels at the end of lines keep so much of the plot's height between them.
LABEL_GAP = 12.0
UNIT = 1000.0
# A line of so few points shows each of them.
FEW = 24


class Curve(Value, frozen=True):
    """What is to be drawn. `None` and what is no number interrupt the line."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float | None, ...]
    main: bool = True


class Tick(Value, frozen=True):
    at: float
    text: str


class Line(Value, frozen=True):
    """A curve's path. `style` 0 is the accent's, 1 and more are the quiet ones."""

    label: str
    value: str
    path: str
    dots: tuple[tuple[float, float], ...]
    label_at: float
    style: int


class Mark(Value, frozen=True):
    """A moment on the x axis, with a dot on the line that it chose. `anchor` is SVG's."""

    at: float
    text: str
    dot: tuple[float, float] | None = None
    anchor: str = "start"


class Chart(Value, frozen=True):
    """One chart. `alt` says it in words; `lines` is empty where there was nothing to draw."""

    name: str
    title: str
    unit: str
    alt: str
    x_title: str
    lines: tuple[Line, ...] = ()
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    mark: Mark | None = None
    note: str = ""


class Axis(Value, frozen=True):
    """A stretch of figures, with ticks at round ones."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) * 100


def chart(
    name: str,
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str = "",
    x_title: str = "step",
    share: bool = False,
    mark: tuple[float, str] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Chart:
    """A chart of at most MOST_LINES curves. `share` figures (0 to 1) are shown in percent.

    `low` and `high` are what the y axis must hold.
    """
    drawn, left = list(curves[:MOST_LINES]), curves[MOST_LINES:]
    notes = [f"{len(left)} more lines are not drawn"] if left else []
    whole = [_clean(curve) for curve in drawn]
    notes += [f"{curve.label}: {missing}" for curve, missing in whole if missing]
    drawn = [curve for curve, _ in whole if any(y is not None for y in curve.ys)]
    xs = [x for curve in drawn for x, y in zip(curve.xs, curve.ys, strict=True) if y is not None]
    ys = [y for curve in drawn for y in curve.ys if y is not None]
    near = xs and 0 < min(xs) < max(xs) / 4  # counted from the beginning, most likely
    x_axis = axis([0.0, *xs] if near else xs, whole=True) if xs else None
    y_axis = axis([*ys, *(v for v in (low, high) if v is not None)]) if ys else None
    blank = Chart(name=name, title=title, unit="%" if share else unit, alt="", x_title=x_title)
    if x_axis is None or y_axis is None:
        said = "no value was a number" if curves else "nothing was logged"
        return replace(blank, alt=f"{title}: {said}.", note=said)
    tell: Callable[[float], str] = percent if share else number
    lines = _spread(
        tuple(
            _line(curve, x_axis, y_axis, place, share) for place, curve in enumerate(_ranked(drawn))
        )
    )
    return replace(
        blank,
        alt=f"{title}. " + " ".join(_told(curve, tell, x_title) for curve in drawn),
        lines=lines,
        x_ticks=tuple(Tick(at=x_axis.at(v), text=number(v)) for v in x_axis.ticks),
        y_ticks=tuple(
            Tick(at=100 - y_axis.at(v), text=bare_percent(v, 0) if share else number(v))
            for v in y_axis.ticks
        ),
        mark=_mark(mark, drawn, x_axis, y_axis) if mark else None,
        note="; ".join(notes),
    )


def axis(values: Sequence[float], *, whole: bool = False, wanted: int = 4) -> Axis | None:
    """Round ends and ticks around finite `values`; None where they are too far apart to be drawn.

    With `whole` it ends where the values end, as an x axis should.
    """
    low, high = min(values), max(values)
    if not math.isfinite(high - low) or abs(high) > 1e300 or abs(low) > 1e300:
        return None
    if high - low <= abs(high) * 1e-12:
        room = abs(high) / 2 or 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / wanted)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if whole:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(place * step for place in range(first, last + 1))
    if whole or not ticks:
        return Axis(low=low, high=high, ticks=ticks)
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= least * 0.999)


def _clean(curve: Curve) -> tuple[Curve, str]:
    """The curve with None for what is no number, and how many of those there were."""
    ys = tuple(y if y is not None and math.isfinite(y) else None for y in curve.ys)
    wrong = sum(y is not None for y in curve.ys) - sum(y is not None for y in ys)
    said = f"{wrong:,} of {len(ys):,} values are no numbers (NaN or infinite)" if wrong else ""
    return Curve(label=curve.label, xs=curve.xs, ys=ys, main=curve.main), said


def _ranked(curves: Sequence[Curve]) -> list[Curve]:
    """Main ones first: the first of them gets the accent."""
    return sorted(curves, key=lambda curve: not curve.main)


def _line(curve: Curve, x_axis: Axis, y_axis: Axis, style: int, share: bool) -> Line:
    runs = [thin(run) for run in stretches(curve)]
    places = [[(x_axis.at(x), 100 - y_axis.at(y)) for x, y in run] for run in runs]
    path = "".join(
        " ".join(
            f"{'M' if place == 0 else 'L'}{x * UNIT / 100:.1f} {y * UNIT / 100:.1f}"
            for place, (x, y) in enumerate(run)
        )
        for run in places
    )
    single = [run[0] for run in places if len(run) == 1]
    few = [point for run in places for point in run]
    last = runs[-1][-1][1]
    return Line(
        label=curve.label,
        value=percent(last) if share else number(last, 3),
        path=path,
        dots=tuple(few if len(few) <= FEW else single),
        label_at=places[-1][-1][1],
        style=style,
    )


def stretches(curve: Curve) -> list[list[tuple[float, float]]]:
    """The points of a curve, parted wherever a value is missing."""
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if y is not None:
            found[-1].append((x, y))
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


def thin(points: list[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points: of each stretch its lowest and its highest, and both ends."""
    if len(points) <= most:
        return points
    width = math.ceil(len(points) / (most // 2 - 1))
    kept = [points[0]]
    for begin in range(0, len(points), width):
        part = points[begin : begin + width]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*kept, points[-1]]


def _spread(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """The same lines, their labels so far apart that each can be read, and inside of the plot."""
    order = sorted(lines, key=lambda line: line.label_at)
    placed: list[float] = []
    for line in order:
        least = placed[-1] + LABEL_GAP if placed else 2.0
        placed.append(max(line.label_at, least))
    over = max(0.0, placed[-1] - 98.0) if placed else 0.0
    for place in range(len(placed) - 1, -1, -1):
        most = placed[place + 1] - LABEL_GAP if place + 1 < len(placed) else placed[place] - over
        placed[place] = min(placed[place], most)
    moved = {id(line): replace(line, label_at=at) for line, at in zip(order, placed, strict=True)}
    return tuple(moved[id(line)] for line in lines)


def _mark(
    mark: tuple[float, str], curves: Sequence[Curve], x_axis: Axis, y_axis: Axis
) -> Mark | None:
    x, text = mark
    if not x_axis.low <= x <= x_axis.high:
        return None
    at = x_axis.at(x)
    main = next(iter(_ranked(curves)))
    known = {px: py for px, py in zip(main.xs, main.ys, strict=True) if py is not None}
    dot = (at, 100 - y_axis.at(known[x])) if x in known else None
    return Mark(at=at, text=text, dot=dot, anchor="end" if at > 50 else "start")


def _told(curve: Curve, say: Callable[[float], str], x_title: str) -> str:
    """One curve in a sentence: where it began and ended, its highest and lowest."""
    points = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if y is not None]
    (x0, y0), (x1, y1) = points[0], points[-1]
    top, bottom = max(points, key=lambda p: p[1]), min(points, key=lambda p: p[1])
    at = f"{x_title}{SPACE}"
    if len(points) == 1:
        return f"{curve.label}: {say(y0)} at {at}{number(x0)}."
    return (
        f"{curve.label}: from {say(y0)} at {at}{number(x0)} to {say(y1)} at {at}{number(x1)}; "
        f"highest {say(top[1])} at {at}{number(top[0])}, "
        f"lowest {say(bottom[1])} at {at}{number(bottom[0])}."
    )

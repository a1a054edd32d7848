"""Positions of a chart's lines, ticks and labels, in percent of the plot, y from its top.

Lines are SVG paths in a square of 1000 units that the page stretches; other parts keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from labctl.insight.report.formatting import SPACE, bare_percent, number, percent
from labctl.model import Value

MOST_POINTS = 500
MOST_LINES = 4
# parts into which an axis is divided at most
MOST_STEPS = 4
# least distance between labels at the ends of lines, in percent of the plot's height
LABEL_GAP = 12.0
UNIT = 1000.0
# The style of a line to compare with, after those of the curves.
REFERENCE = MOST_LINES
# A line of at most this many points shows each of them as a dot.
FEW = 24
# Names on an x axis, and the letters that fit below it together.
MOST_NAMES, MOST_LETTERS = 8, 56


class Curve(Value, frozen=True):
    """A curve to draw. `None`, NaN and infinities interrupt its line."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float | None, ...]
    main: bool = True


class Tick(Value, frozen=True):
    at: float
    text: str


class ChartLine(Value, frozen=True):
    """A curve's path. `style` 0 is the accent color, others are quiet colors."""

    label: str
    value: str
    path: str
    dots: tuple[tuple[float, float], ...]
    label_at: float
    style: int


class Mark(Value, frozen=True):
    """A marked position on the x axis, with a dot on the main line. `anchor` is SVG's."""

    at: float
    text: str
    dot: tuple[float, float] | None = None
    anchor: str = "start"


class Chart(Value, frozen=True):
    """One chart. `alt` describes it in words; `lines` is empty if there is nothing to draw."""

    name: str
    title: str
    unit: str
    alt: str
    x_title: str
    lines: tuple[ChartLine, ...] = ()
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    mark: Mark | None = None
    note: str = ""


class Axis(Value, frozen=True):
    """A range of values, with ticks at round ones."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def position_of(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) * 100


def draw_chart(
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
    reference: Curve | None = None,
    most: int = MOST_LINES,
    names: Sequence[str] = (),
) -> Chart:
    """Lay out a chart of at most `most` curves. `share` values (0 to 1) are shown in percent.

    The y axis always includes `low` and `high`. `reference` is a line to compare the curves with.
    With `names`, the x axis has one place for each: x is an index of `names`.
    """
    drawn, left = list(curves[:most]), curves[most:]
    notes = [f"{len(left)} more lines are not drawn"] if left else []
    cleaned = [_clean(curve) for curve in drawn]
    notes += [f"{curve.label}: {missing}" for curve, missing in cleaned if missing]
    drawn = [curve for curve, _ in cleaned if any(y is not None for y in curve.ys)]
    all_drawn = [*drawn, reference] if reference else drawn
    points = [p for curve in all_drawn for p in zip(curve.xs, curve.ys, strict=True)]
    xs = [x for x, y in points if y is not None]
    ys = [y for _, y in points if y is not None]
    x_axis = _choose_x_axis(xs, names)
    y_axis = choose_axis([*ys, *(v for v in (low, high) if v is not None)]) if ys else None
    blank = Chart(name=name, title=title, unit="%" if share else unit, alt="", x_title=x_title)
    if x_axis is None or y_axis is None:
        reason = "all values are NaN or infinite" if curves else "nothing was logged"
        return replace(blank, alt=f"{title}: {reason}.", note=reason)
    format_value: Callable[[float], str] = percent if share else number
    name_x: Callable[[float], str] = (lambda x: names[int(x)]) if names else number
    styled = [*enumerate(_sort_main_first(drawn)), *([(REFERENCE, reference)] if reference else [])]
    lines = _separate_labels(
        tuple(_line(curve, x_axis, y_axis, style, share) for style, curve in styled)
    )
    return replace(
        blank,
        alt=f"{title}. "
        + " ".join(_describe(curve, format_value, x_title, name_x) for curve in drawn),
        lines=lines,
        x_ticks=tuple(
            Tick(
                at=x_axis.position_of(v), text=_fit_name(name_x(v), x_axis) if names else name_x(v)
            )
            for v in x_axis.ticks
        ),
        y_ticks=tuple(
            Tick(at=100 - y_axis.position_of(v), text=bare_percent(v, 0) if share else number(v))
            for v in y_axis.ticks
        ),
        mark=_mark(mark, drawn, x_axis, y_axis) if mark else None,
        note="; ".join(notes),
    )


def _choose_x_axis(xs: Sequence[float], names: Sequence[str]) -> Axis | None:
    if names:
        places = range(0, len(names), math.ceil(len(names) / MOST_NAMES))
        return Axis(low=-0.5, high=len(names) - 0.5, ticks=tuple(map(float, places)))
    if not xs:
        return None
    near = 0 < min(xs) < max(xs) / 4  # such an axis most likely counts from 0
    return choose_axis([0.0, *xs] if near else xs, whole=True)


def _fit_name(name: str, axis: Axis) -> str:
    """Shorten a name to its share of the axis."""
    most = max(3, MOST_LETTERS // len(axis.ticks))
    return name if len(name) <= most else f"{name[: most - 1]}…"


def choose_axis(values: Sequence[float], *, whole: bool = False) -> Axis | None:
    """Choose round ends and ticks for finite `values`; None if their range is too large to draw.

    With `whole`, the axis ends where the values end, as an x axis should.
    """
    low, high = min(values), max(values)
    if not math.isfinite(high - low) or abs(high) > 1e300 or abs(low) > 1e300:
        return None
    if high - low <= abs(high) * 1e-12:
        room = abs(high) / 2 or 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / MOST_STEPS)
    if whole and all(float(value).is_integer() for value in values):
        step = max(1.0, step)  # There is no step 1.5, and there are no 1.5 processes.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if whole:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(place * step for place in range(first, last + 1))
    if whole or not ticks:
        return Axis(low=low, high=high, ticks=ticks)
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5, 10 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= least * 0.999)


def _clean(curve: Curve) -> tuple[Curve, str]:
    """Replace NaN and infinities by None; return the curve and a note that counts them."""
    ys = tuple(y if y is not None and math.isfinite(y) else None for y in curve.ys)
    wrong = sum(y is not None for y in curve.ys) - sum(y is not None for y in ys)
    note = f"{wrong:,} of {len(ys):,} values are NaN or infinite" if wrong else ""
    return Curve(label=curve.label, xs=curve.xs, ys=ys, main=curve.main), note


def _sort_main_first(curves: Sequence[Curve]) -> list[Curve]:
    """Sort the main curves first: the first curve gets the accent color."""
    return sorted(curves, key=lambda curve: not curve.main)


def _line(curve: Curve, x_axis: Axis, y_axis: Axis, style: int, share: bool) -> ChartLine:
    runs = [reduce_points(run) for run in split_at_gaps(curve)]
    positions = [
        [(x_axis.position_of(x), 100 - y_axis.position_of(y)) for x, y in run] for run in runs
    ]
    path = "".join(
        " ".join(
            f"{'M' if index == 0 else 'L'}{x * UNIT / 100:.1f} {y * UNIT / 100:.1f}"
            for index, (x, y) in enumerate(run)
        )
        for run in positions
    )
    single = [run[0] for run in positions if len(run) == 1]
    few = [point for run in positions for point in run]
    last = runs[-1][-1][1]
    return ChartLine(
        label=curve.label,
        value=percent(last) if share else number(last, 3),
        path=path,
        dots=tuple(few if len(few) <= FEW else single),
        label_at=positions[-1][-1][1],
        style=style,
    )


def split_at_gaps(curve: Curve) -> list[list[tuple[float, float]]]:
    """Split a curve into stretches without missing values."""
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if y is not None:
            found[-1].append((x, y))
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


def reduce_points(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce to at most MOST_POINTS: the lowest and highest of each part, and both ends."""
    if len(points) <= MOST_POINTS:
        return points
    width = math.ceil(len(points) / (MOST_POINTS // 2 - 1))
    kept = [points[0]]
    for begin in range(0, len(points), width):
        part = points[begin : begin + width]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*kept, points[-1]]


def _separate_labels(lines: tuple[ChartLine, ...]) -> tuple[ChartLine, ...]:
    """Move the lines' labels apart so that they do not overlap, and stay inside the plot."""
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
    at = x_axis.position_of(x)
    main = next(iter(_sort_main_first(curves)))
    values = {px: py for px, py in zip(main.xs, main.ys, strict=True) if py is not None}
    dot = (at, 100 - y_axis.position_of(values[x])) if x in values else None
    return Mark(at=at, text=text, dot=dot, anchor="end" if at > 50 else "start")


def _describe(
    curve: Curve,
    format_value: Callable[[float], str],
    x_title: str,
    name_x: Callable[[float], str],
) -> str:
    """Describe a curve in a sentence: its first and last value, the highest and the lowest."""
    points = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if y is not None]
    (x0, y0), (x1, y1) = points[0], points[-1]
    top, bottom = max(points, key=lambda p: p[1]), min(points, key=lambda p: p[1])
    at = f"{x_title}{SPACE}" if x_title else ""
    if len(points) == 1:
        return f"{curve.label}: {format_value(y0)} at {at}{name_x(x0)}."
    return (
        f"{curve.label}: from {format_value(y0)} at {at}{name_x(x0)} "
        f"to {format_value(y1)} at {at}{name_x(x1)}; "
        f"highest {format_value(top[1])} at {at}{name_x(top[0])}, "
        f"lowest {format_value(bottom[1])} at {at}{name_x(bottom[0])}."
    )

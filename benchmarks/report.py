"""A run's rows as values for the file, as tables, and the verdict about the targets."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from benchmarks.measure import Comparison, Row, ratio

HEAD = ("", "labctl", "other", "ratio", "spread", "target", "")


class ResultRow(msgspec.Struct, frozen=True):
    """A measured row. Figures are in `unit`.

    `ours` is the median of a row of labctl, and `theirs` that of its baseline. A row of another
    program has only `theirs`, its own median.
    """

    group: str
    comparison: str
    name: str
    unit: str
    ours: float | None
    theirs: float | None
    ratio: float | None
    # limit of the ratio
    target: float | None
    # limit of the median
    limit: float | None
    # None without a target
    met: bool | None
    against: str
    spread: float
    # whether all rounds were measured
    complete: bool
    figures: list[float]

    @property
    def is_missed(self) -> bool:
        return self.met is False


def read_rows(group: str, comparison: Comparison, *, complete: bool) -> list[ResultRow]:
    """Return the rows that have figures by now."""
    return [
        _read_row(group, comparison, row, complete=complete)
        for row in comparison.rows
        if row.figures
    ]


def _read_row(group: str, comparison: Comparison, row: Row, *, complete: bool) -> ResultRow:
    baseline = comparison.baseline(row)
    multiple = ratio(row, baseline) if baseline else None
    met = None
    if row.target is not None or row.limit is not None:
        met = (row.target is None or (multiple is not None and multiple <= row.target)) and (
            row.limit is None or row.median <= row.limit
        )
    other = baseline.median if baseline else None
    return ResultRow(
        group=group,
        comparison=comparison.title,
        name=row.name,
        unit=row.unit,
        ours=_round(row.median) if row.is_ours else None,
        theirs=_round(other) if row.is_ours else _round(row.median),
        ratio=None if multiple is None else round(multiple, 3),
        target=row.target,
        limit=row.limit,
        met=met,
        against=baseline.name if baseline else "",
        spread=round(row.spread, 5),
        complete=complete,
        figures=[round(figure, 5) for figure in row.figures],
    )


def _round(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 5)


def draw_table(rows: list[ResultRow], heading: str) -> str:
    """Return a table for people below its heading."""
    body = [_draw_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in (HEAD, *body)) for column in range(len(HEAD))]
    return "\n".join([heading, *(_draw_line(line, widths) for line in (HEAD, *body))])


def _draw_cells(row: ResultRow) -> tuple[str, ...]:
    limits = [f"<= {row.target:g}"] if row.target is not None else []
    limits += [f"<= {figure_text(row.limit, row.unit)}"] if row.limit is not None else []
    return (
        f"  {row.name}",
        figure_text(row.ours, row.unit),
        figure_text(row.theirs, row.unit),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        figure_text(row.spread, row.unit),
        ", ".join(limits),
        {None: "", True: "met", False: "MISSED"}[row.met],
    )


def figure_text(figure: float | None, unit: str) -> str:
    """Return a figure for a table; times as milliseconds below 20 s."""
    if figure is None:
        return ""
    if unit != "s":
        return f"{figure:.4g} {unit}"
    if figure >= 20:
        return f"{figure:.1f} s"
    return f"{figure * 1000:.0f} ms" if figure >= 0.02 else f"{figure * 1000:.2f} ms"


def _draw_line(line: tuple[str, ...], widths: list[int]) -> str:
    cells = [line[0].ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
    return "  ".join(cells).rstrip()


def draw_verdict(rows: Iterable[ResultRow]) -> str:
    """Return how many targets are met, and a table of the missed ones."""
    judged = [row for row in rows if row.met is not None]
    missed = [row for row in judged if row.is_missed]
    count = f"{len(judged) - len(missed)} of {len(judged)} targets met"
    if not missed:
        return count
    named = [msgspec.structs.replace(row, name=f"{row.comparison}: {row.name}") for row in missed]
    return draw_table(named, f"{count}; missed:")

"""Results as JSON and as a table, and which targets are met."""

from __future__ import annotations

from typing import Any

from benchmarks.measure import Row, ratio


def lines(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one object per row. `met` is None without a target."""
    baselines = {row.group: row for row in reversed(rows)}
    named = {(row.group, row.name): row for row in rows}
    return [
        _line(row, named[row.group, row.against] if row.against else baselines[row.group])
        for row in rows
    ]


def _line(row: Row, baseline: Row) -> dict[str, Any]:
    found = ratio(row, baseline)
    met = None
    if row.target is not None or row.target_s is not None:
        met = (row.target is None or found <= row.target) and (
            row.target_s is None or row.median_s <= row.target_s
        )
    return {
        "group": row.group,
        "name": row.name,
        "median_ms": round(row.median_s * 1000, 2),
        "spread_ms": round(row.spread_s * 1000, 2),
        "fastest_ms": round(min(row.seconds) * 1000, 2),
        "ratio": round(found, 3),
        "against": baseline.name,
        "target": row.target,
        "target_ms": None if row.target_s is None else row.target_s * 1000,
        "met": met,
        "seconds": [round(one, 5) for one in row.seconds],
    }


def table(found: list[dict[str, Any]]) -> str:
    """Return a table for people. A ratio is relative to the group's first row unless noted."""
    head = ("", "median ms", "spread", "fastest", "ratio", "target", "")
    body = [_cells(line) for line in found]
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
    out = [_drawn(head, widths)]
    group = ""
    for line, row in zip(found, body, strict=True):
        if line["group"] != group:
            group = line["group"]
            out.append(f"\n{group} (ratio to: {line['against']})")
        out.append(_drawn(row, widths))
    return "\n".join(out)


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    target = "" if line["target"] is None else f"<= {line['target']:g}"
    if line["target_ms"] is not None:
        target = f"<= {line['target_ms']:g} ms"
    met = {None: "", True: "met", False: "MISSED"}[line["met"]]
    figures = (line["median_ms"], line["spread_ms"], line["fastest_ms"])
    return (line["name"], *(_short(one) for one in figures), f"{line['ratio']:.2f}", target, met)


def _short(figure: float) -> str:
    return f"{figure:.0f}" if figure >= 20 else f"{figure:.2f}"


def _drawn(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [row[0].ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join(cells).rstrip()


def verdict(found: list[dict[str, Any]]) -> str:
    """Return how many targets are met, and by how much the others are missed."""
    judged = [line for line in found if line["met"] is not None]
    missed = [line for line in judged if not line["met"]]
    said = [f"{len(judged) - len(missed)} of {len(judged)} targets met"]
    for line in missed:
        if line["target_ms"] is None:
            figures = f"{line['ratio']:.2f} times {line['against']}, target {line['target']:g}"
        else:
            figures = f"{line['median_ms']:.2f} ms, target {line['target_ms']:g} ms"
        said.append(f"  missed: {line['group']}: {line['name']}: {figures}")
    return "\n".join(said)

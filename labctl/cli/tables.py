"""Tables, ages and JSON on standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from labctl.cli.exit_codes import clean
from labctl.lazy import lazy_imports
from labctl.text import duration_text

if TYPE_CHECKING:
    from msgspec import Struct

with lazy_imports(__name__):
    import json
    import textwrap

    from labctl.cli import wrapping

# columns that are shortened, and characters that they and a table's last column keep
_NAMES = {"NAME", "TEST"}
_NAME_WIDTH = 12
_LAST_WIDTH = 24
# columns before the last column below a row, if that has no room below the second column
_SMALL_INDENT = 2


def shorten(text: str, width: int) -> str:
    """Cut a text that is wider than `width`, with an ellipsis."""
    width = max(width, 9)  # less would say nothing
    return text if len(text) <= width else f"{text[: width - 1]}…"


def age_text(moment: float | None, now: float | None = None) -> str:
    """Write the time since a Unix time; "-" for None and 0."""
    if not moment:
        return "-"
    return duration_text((now or time.time()) - moment)


def wrap_text(text: str, indent: int = 0, width: int = 0) -> list[str]:
    """Wrap text into lines that fit the screen after the indent; words are never broken.

    A program that reads the text gets one line, whatever COLUMNS says. `width` is a terminal's.
    """
    if not width:
        width = wrapping.read_output_width() if sys.stdout.isatty() else wrapping.UNLIMITED
    room = max(width - indent, 20)
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)


def print_table(
    rows: Sequence[tuple[str, ...]],
    headings: tuple[str, ...],
    width: int = 0,
    *,
    cut: bool = True,
    optional: tuple[str, ...] = (),
    unneeded: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Print a table, and return its headings without those left out.

    The last column ends at the screen's edge; with `cut=False` it is whole. On a terminal, a whole
    last column is folded at spaces, and names are shortened to make room for it; where that leaves
    too little room, it is below its row. The columns with the `optional` headings are left out, in
    this order, until the others fit; those with the `unneeded` headings always are. A program that
    reads the table gets all of it, whatever COLUMNS says. `width` is that of a terminal.
    """
    is_terminal = bool(width) or sys.stdout.isatty()
    width = width or wrapping.read_output_width()
    cells = [tuple(clean(c).replace("\n", " ") for c in row) for row in rows]
    if is_terminal:
        for name in unneeded:
            headings, cells = _drop_column(headings, cells, name)
        headings, cells = _leave_out(headings, cells, optional, width, cut=cut)
    widths = _measure_columns(headings, cells)
    if is_terminal:
        widths = _narrow_names(widths, headings, width)
    room = width - sum(w + 2 for w in widths[:-1])
    indent = _choose_indent([row[-1] for row in cells], widths[0] + 2, room, width)
    for index, row in enumerate([headings, *cells]):
        lines = [row[-1]]
        if cut and is_terminal:
            lines = [shorten(row[-1], room)]
        elif is_terminal and len(row[-1]) > room:
            lines = _fold_last(row[-1], room, indent, width)
        columns = (shorten(c, w).ljust(w) for c, w in zip(row[:-1], widths, strict=False))
        # Spaces at the end of a line would wrap in a narrow terminal.
        line = "  ".join([*columns, lines[0]]).rstrip()
        click.echo(click.style(line, dim=True) if index == 0 else line)
        for line in lines[1:]:
            click.echo(line)
    return headings


def _measure_columns(headings: tuple[str, ...], cells: list[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(headings, *cells, strict=True)]


def _leave_out(
    headings: tuple[str, ...],
    cells: list[tuple[str, ...]],
    optional: tuple[str, ...],
    width: int,
    *,
    cut: bool,
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the table without the optional columns that a terminal of `width` has no room for."""
    for name in optional:
        widths = _narrow_names(_measure_columns(headings, cells), headings, width)
        if not cut:  # a last column that is folded needs less
            widths = [*widths[:-1], min(widths[-1], _LAST_WIDTH)]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
        headings, cells = _drop_column(headings, cells, name)
    return headings, cells


def _drop_column(
    headings: tuple[str, ...], cells: list[tuple[str, ...]], name: str
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    kept = [index for index, heading in enumerate(headings) if heading != name]
    return (
        tuple(headings[index] for index in kept),
        [tuple(row[index] for index in kept) for row in cells],
    )


def _measure_longest_word(text: str) -> int:
    """Return the columns that a folded last column needs at least."""
    return max([_LAST_WIDTH, *map(len, text.split())])


def _choose_indent(texts: Sequence[str], second: int, room: int, width: int) -> int:
    """Return the indent of all lines below their rows: that of the `second` column if they fit."""
    needed = [need for text in texts if (need := _measure_longest_word(text)) > room]
    spare = width - max(needed, default=0)
    return next((indent for indent in (second, _SMALL_INDENT) if indent <= spare), 0)


def _fold_last(text: str, room: int, indent: int, width: int) -> list[str]:
    """Fold the last column of a row: its part of the row, then the lines below it.

    A word that does not fit, such as a path, is on a line of its own, whatever its length.
    """
    if room < _measure_longest_word(text):
        return ["", *(" " * indent + line for line in wrap_text(text, indent, width))]
    first, *others = wrap_text(text, width - room, width)
    return [first, *(" " * (width - room) + line for line in others)]


def _narrow_names(widths: list[int], headings: tuple[str, ...], width: int) -> list[int]:
    """Return the widths with narrower columns of names, so that the last column has room."""
    excess = sum(w + 2 for w in widths[:-1]) + min(widths[-1], _LAST_WIDTH) - width
    narrowed = []
    for heading, column in zip(headings, widths, strict=True):
        most = max(_NAME_WIDTH, column - max(0, excess)) if heading in _NAMES else column
        narrowed.append(min(column, most))
        excess -= column - narrowed[-1]
    return narrowed


def print_json(report: Struct | Mapping[str, object]) -> None:
    """Print one JSON object with a version: the fields of a value, or values by their keys."""
    click.echo(json.dumps({"version": 1, **msgspec.to_builtins(report)}, indent=2))

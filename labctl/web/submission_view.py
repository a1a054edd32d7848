"""The files of a submission as the page for marking shows them: lines, cells and images.

A student wrote them, and chose their names. Only the report stays HTML, and a page of its own shows
it in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from labctl.courses.commenting import MOST_FILE_BYTES
from labctl.courses.notebook import RenderedCell, parse_notebook
from labctl.courses.records.comments import CODE, NOTEBOOK, LineComment
from labctl.courses.submission_files import ReadableSubmission, split_lines
from labctl.model import Value

Kind = Literal["report", "notebook", "log", "code"]
KINDS: tuple[Kind, ...] = ("report", "notebook", "log", "code")
# lines of a file that are shown: the last ones of a log, the first ones of another
MOST_LINES = 4000
# characters of a line that are shown
MOST_LINE_CHARS = 2000


class PartView(Value, frozen=True):
    """A file of the submission. `number` is its place in the bundle, which its address has."""

    number: int
    kind: Kind
    path: str
    size: int
    comments: int = 0

    @property
    def name(self) -> str:
        return self.path.removeprefix(CODE).removeprefix("logs/")


class LineView(Value, frozen=True):
    """A line of a file, and the comments on it."""

    number: int
    text: str
    comments: tuple[LineComment, ...] = ()


class FileView(Value, frozen=True):
    """The content of a file: lines, or the cells of a notebook with the comments by cell.

    `note` says what is left out, or why nothing can be shown.
    """

    part: PartView
    lines: tuple[LineView, ...] = ()
    cells: tuple[tuple[RenderedCell, tuple[LineComment, ...]], ...] = ()
    note: str = ""
    last: int = 0


def list_parts(
    submission: ReadableSubmission, comments: Sequence[LineComment]
) -> tuple[PartView, ...]:
    """Return the files of a submission: the report, notebooks, logs, and then the others."""
    receipt = submission.receipt
    own = [
        comment.file
        for comment in comments
        if (comment.student, comment.number) == (receipt.student, receipt.number)
    ]
    parts = [
        PartView(
            number=number,
            kind=_find_kind(member.path),
            path=member.path,
            size=member.size,
            comments=own.count(member.path),
        )
        for number, member in enumerate(submission.members)
    ]
    return tuple(sorted(parts, key=lambda part: KINDS.index(part.kind)))


def _find_kind(path: str) -> Kind:
    if path == "report.html":
        return "report"
    if path.lower().endswith(NOTEBOOK):
        return "notebook"
    return "log" if path.startswith("logs/") else "code"


def open_part(
    submission: ReadableSubmission | None,
    parts: Sequence[PartView],
    number: int | None,
    comments: Sequence[LineComment],
) -> FileView | None:
    if submission is None or not parts:
        return None
    part = next((part for part in parts if part.number == number), parts[0])
    if part.kind == "report":
        return FileView(part=part)
    content = submission.read_file(part.path, MOST_FILE_BYTES)
    by_line: dict[int, tuple[LineComment, ...]] = {}
    receipt = submission.receipt
    for one in comments:
        if (one.student, one.number, one.file) == (receipt.student, receipt.number, part.path):
            by_line[one.line] = (*by_line.get(one.line, ()), one)
    if part.kind == "notebook":
        return _show_notebook(part, content, by_line)
    return _show_lines(part, content, by_line)


def _show_notebook(
    part: PartView, content: bytes, comments: Mapping[int, tuple[LineComment, ...]]
) -> FileView:
    try:
        cells = parse_notebook(content)
    except ValueError as error:
        view = _show_lines(part, content, comments)
        return msgspec.structs.replace(view, note=f"Shown as text, since {error}.")
    shown = tuple((cell, comments.get(cell.number, ())) for cell in cells)
    return FileView(part=part, cells=shown, last=len(cells))


def _show_lines(
    part: PartView, content: bytes, comments: Mapping[int, tuple[LineComment, ...]]
) -> FileView:
    if b"\0" in content:
        return FileView(part=part, note="This file is not text. The bundle contains it.")
    lines = split_lines(content)
    first = max(0, len(lines) - MOST_LINES) if part.kind == "log" else 0
    notes = []
    if part.size > len(content):
        notes.append(f"Only the first {MOST_FILE_BYTES >> 20} MB of the file are read.")
    if len(lines) > MOST_LINES:
        end = "last" if part.kind == "log" else "first"
        notes.append(f"Only the {end} {MOST_LINES} of {len(lines)} lines are shown.")
    return FileView(
        part=part,
        lines=tuple(
            LineView(
                number=number,
                text=text if len(text) <= MOST_LINE_CHARS else f"{text[:MOST_LINE_CHARS]} [cut]",
                comments=comments.get(number, ()),
            )
            for number, text in enumerate(lines[first : first + MOST_LINES], first + 1)
        ),
        note=" ".join(notes),
        last=len(lines),
    )

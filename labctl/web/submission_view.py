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
from labctl.text import bytes_text

Kind = Literal["report", "notebook", "log", "code"]
KINDS: tuple[Kind, ...] = ("report", "notebook", "log", "code")
# lines of a file that are shown: the last ones of a log, the first ones of another
MOST_LINES = 4000
# characters of a line, and of a file, that are shown
MOST_LINE_CHARS = 2000
MOST_SHOWN_CHARS = 1_000_000


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

    `unseen` are comments on lines that are left out; `note` says what is, or why nothing can be
    shown. `last` is the number of the last line or cell.
    """

    part: PartView
    lines: tuple[LineView, ...] = ()
    cells: tuple[tuple[RenderedCell, tuple[LineComment, ...]], ...] = ()
    unseen: tuple[LineComment, ...] = ()
    note: str = ""
    last: int = 0


def list_parts(
    submission: ReadableSubmission, comments: Sequence[LineComment]
) -> tuple[PartView, ...]:
    """Return the files of a submission: the report, notebooks, logs, then code, .files last."""
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
    # Nobody marks .gitignore: the page opens with a file of the student's.
    return tuple(
        sorted(parts, key=lambda part: (KINDS.index(part.kind), part.name.startswith(".")))
    )


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
    is_log = part.kind == "log"
    shown = _choose_lines(lines, from_end=is_log)
    notes = []
    if part.size > len(content):
        notes.append(f"Only the first {bytes_text(MOST_FILE_BYTES)} of the file are read.")
    if len(shown) < len(lines):
        end = "last" if is_log else "first"
        notes.append(f"Only the {end} {len(shown)} of {len(lines)} lines are shown.")
    return FileView(
        part=part,
        lines=tuple(
            LineView(number=number, text=text, comments=comments.get(number, ()))
            for number, text in shown.items()
        ),
        unseen=tuple(one for line, own in comments.items() if line not in shown for one in own),
        note=" ".join(notes),
        last=len(lines),
    )


def _choose_lines(lines: Sequence[str], *, from_end: bool) -> dict[int, str]:
    """Return the lines that are shown by their number, in the file's order."""
    numbers = range(len(lines), 0, -1) if from_end else range(1, len(lines) + 1)
    shown: dict[int, str] = {}
    chars = 0
    for number in numbers[:MOST_LINES]:
        text = lines[number - 1]
        text = text if len(text) <= MOST_LINE_CHARS else f"{text[:MOST_LINE_CHARS]} [cut]"
        chars += len(text)
        if chars > MOST_SHOWN_CHARS:
            break
        shown[number] = text
    return dict(sorted(shown.items()))

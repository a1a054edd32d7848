"""A table of text as spreadsheets and course systems write it: encoding, separator, lines.

Line numbers are the file's own, also where a cell holds line breaks.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from errno import ENOENT
from pathlib import Path

from labctl.config.document import plain
from labctl.errors import ConfigError, LabError, Problem
from labctl.model import Value

MAX_TABLE_BYTES = 8 * 1024 * 1024
MAX_ROWS = 20_000
DELIMITERS = (",", ";", "\t")
# Columns that mean something here. What else stands twice, as two quizzes of one name do in Moodle,
# is nobody's matter.
READ = frozenset(
    (
        *("id", "name", "email", "team", "group", "section", "active", "student"),
        *("sis user id", "sis login id", "integration id", "first name", "last name"),
        *("surname", "email address", "id number", "username", "department"),
        *("identifier", "full name", "github_username", "roster_identifier"),
        *("student_id", "first_name", "last_name", "lms_user_id", "assignment"),
        *("assignment_name", "grade"),
    )
)
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2007\u202f\u3000"), " ")
_BOMS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


class Shape(Value, frozen=True):
    """How a table was written, so that another one can be written alike."""

    encoding: str = "utf-8"
    bom: bytes = b""
    delimiter: str = ","
    newline: str = "\n"

    def write(self, rows: Iterable[Sequence[str]]) -> bytes:
        stream = io.StringIO(newline="")
        writer = csv.writer(stream, delimiter=self.delimiter, lineterminator=self.newline)
        writer.writerows(rows)
        return self.bom + stream.getvalue().encode(self.encoding)


class Table(Value, frozen=True):
    """`header` as written but for the spaces around; every row is as long as it."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    shape: Shape

    def column(self, *names: str) -> int:
        """The index of the first of these columns that is there, in any case; else -1."""
        folded = [one.casefold() for one in self.header]
        return next((folded.index(n.casefold()) for n in names if n.casefold() in folded), -1)

    def has(self, *names: str) -> bool:
        """Whether all of these columns are there."""
        return all(self.column(name) >= 0 for name in names)

    def cell(self, row: int, *names: str) -> str:
        """The cell without the spaces around it; "" where there is no such column.

        Spaces of other kinds, as pages and spreadsheets leave them in names, are plain ones.
        """
        column = self.column(*names)
        return self.rows[row][column].translate(_SPACES).strip() if column >= 0 else ""


def read_table(data: bytes, problems: list[Problem]) -> Table | None:
    """The table in these bytes; None, and `problems`, where there is none."""
    if len(data) > MAX_TABLE_BYTES:
        problems.append(Problem("", 0, f"more than {MAX_TABLE_BYTES // 2**20} MiB are not read"))
        return None
    decoded = _decoded(data, problems)
    if decoded is None:
        return None
    text, encoding, bom = decoded
    skipped, delimiter, text = _delimiter(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    shape = Shape(encoding=encoding, bom=bom, delimiter=delimiter, newline=newline)
    found = _rows(text, delimiter, skipped, problems)
    if not found:
        problems += [] if problems else [Problem("", 0, "there is nothing in it")]
        return None
    header = tuple(cell.strip() for cell in found[0][1])
    seen: dict[str, int] = {}
    for place, name in enumerate(header):
        if name.casefold() in READ and name.casefold() in seen:
            problems.append(Problem("", found[0][0], f"the column {name!r} stands twice"))
        seen.setdefault(name.casefold(), place)
    body = [(line, _fitting(row, len(header), line, problems)) for line, row in found[1:]]
    return Table(
        header=header,
        rows=tuple(row for _, row in body),
        lines=tuple(line for line, _ in body),
        shape=shape,
    )


def read_some(path: Path) -> bytes:
    """At most what a table may be, and one byte; LabError for what is no file or cannot be read."""
    try:
        if not path.is_file():
            raise FileNotFoundError(ENOENT, "there is no such file")
        with path.open("rb") as file:
            return file.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise LabError(
            f"cannot read {plain(str(path))}",
            why=error.strerror or "",
            hint=f"ls -l {plain(str(path))}",
        ) from error


def wrong(where: str, problems: Sequence[Problem], *, hint: str = "") -> ConfigError:
    """The error for a table with these problems, in the order of its lines."""
    distinct = sorted(dict.fromkeys(problems), key=lambda one: (one.line == 0, one.line))
    count = "one problem" if len(distinct) == 1 else f"{len(distinct)} problems"
    return ConfigError(
        f"{where} has {count}",
        tuple(distinct),
        why="nothing was imported and nothing was changed",
        hint=hint or "mend these lines and try again",
    )


def _decoded(data: bytes, problems: list[Problem]) -> tuple[str, str, bytes] | None:
    bom = next((mark for mark in _BOMS if data.startswith(mark)), b"")
    encoding = _BOMS.get(bom) or _guessed(data)
    try:
        text = data[len(bom) :].decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        said = f"byte {data[min(error.start, len(data) - 1)]:#04x} is not {encoding.upper()}"
        problems.append(Problem("", line, f"{said}; save the file as CSV UTF-8"))
        return None
    if "\x00" in text:
        line = text.count("\n", 0, text.index("\x00")) + 1
        problems.append(Problem("", line, "a zero byte: this is no table of text"))
        return None
    return text, encoding, bom


def _guessed(data: bytes) -> str:
    """UTF-16 without a mark has a zero byte in almost every other place."""
    head = data[:200]
    if len(head) >= 4 and head[1::2].count(0) > len(head) // 3:
        return "utf-16-le"
    if len(head) >= 4 and head[0::2].count(0) > len(head) // 3:
        return "utf-16-be"
    return "utf-8"


def _delimiter(text: str) -> tuple[int, str, str]:
    """(lines skipped, the separator, the rest): `sep=;` on top, or what the header has most of."""
    first, _, rest = text.partition("\n")
    said = first.strip().casefold()
    if said.startswith("sep=") and said[4:] in DELIMITERS:
        return 1, said[4:], rest
    line = next((one for one in text.split("\n") if one.strip()), "")
    outside = "".join(line.split('"')[::2])
    return 0, max(DELIMITERS, key=outside.count), text


def _rows(
    text: str, delimiter: str, skipped: int, problems: list[Problem]
) -> list[tuple[int, list[str]]]:
    """(line, cells) of every row in which something stands."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    found: list[tuple[int, list[str]]] = []
    line = 1 + skipped
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                found.append((line, row))
            line = reader.line_num + 1 + skipped
            if len(found) > MAX_ROWS:
                problems.append(Problem("", line, f"more than {MAX_ROWS} rows"))
                return found
    except csv.Error as error:
        said = str(error)
        said = "a quotation mark is not closed" if "unexpected end" in said else said
        problems.append(Problem("", line, said))
    return found


def _fitting(row: list[str], width: int, line: int, problems: list[Problem]) -> tuple[str, ...]:
    """The row with as many cells as the header has; more or fewer are told."""
    while len(row) > width and not row[-1].strip():
        row = row[:-1]
    if len(row) != width:
        problems.append(Problem("", line, f"{len(row)} cells, where the header has {width}"))
    return tuple([*row, *[""] * width][:width])

"""CSV tables as spreadsheets and course systems write them: any encoding, separator, line end.

Line numbers are those of the file, even if a cell has line breaks.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from errno import ENOENT
from pathlib import Path

from labctl.config.document import make_problems_error, make_read_error
from labctl.errors import ConfigError, Problem
from labctl.model import Value

MAX_TABLE_BYTES = 8 * 1024 * 1024
MAX_ROWS = 20_000
DELIMITERS = (",", ";", "\t")
# Columns that labctl reads. Other columns may occur twice, like two quizzes of one name in Moodle.
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
# what a roster without lines lacks
FORM = (
    "write a line for each student below the names of the columns, such as:\n"
    "id,name,email\nalice,Alice Jones,alice@example.edu"
)
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2007\u202f\u3000"), " ")
_BOMS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


class TableShape(Value, frozen=True):
    """How a table was written, so that another can be written the same way."""

    encoding: str = "utf-8"
    bom: bytes = b""
    delimiter: str = ","
    newline: str = "\n"

    def write(self, rows: Iterable[Sequence[str]]) -> bytes:
        """Return these rows as a table of this shape."""
        stream = io.StringIO(newline="")
        writer = csv.writer(stream, delimiter=self.delimiter, lineterminator=self.newline)
        writer.writerows(rows)
        return self.bom + stream.getvalue().encode(self.encoding)


class Table(Value, frozen=True):
    """A table: its `header` without surrounding spaces, and rows of the same length."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    shape: TableShape

    def column(self, *names: str) -> int:
        """Return the index of the first of these columns that exists, in any case, or -1."""
        header = [name.casefold() for name in self.header]
        wanted = [name.casefold() for name in names]
        return next((header.index(name) for name in wanted if name in header), -1)

    def has_columns(self, *names: str) -> bool:
        """Tell whether all of these columns exist."""
        return all(self.column(name) >= 0 for name in names)

    def cell(self, row: int, *names: str) -> str:
        """Return the cell without surrounding spaces; "" if there is no such column.

        Special spaces, as web pages and spreadsheets leave them in names, become plain ones.
        """
        column = self.column(*names)
        return self.rows[row][column].translate(_SPACES).strip() if column >= 0 else ""


def read_table(data: bytes, problems: list[Problem]) -> Table | None:
    """Parse the table in these bytes; None, with `problems`, if that fails."""
    if len(data) > MAX_TABLE_BYTES:
        problems.append(Problem("", 0, f"the file is larger than {MAX_TABLE_BYTES // 2**20} MiB"))
        return None
    decoded = _decode(data, problems)
    if decoded is None:
        return None
    text, encoding, bom = decoded
    skipped, delimiter, text = _find_delimiter(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    shape = TableShape(encoding=encoding, bom=bom, delimiter=delimiter, newline=newline)
    rows = _read_rows(text, delimiter, skipped, problems)
    if not rows:
        problems += [] if problems else [Problem("", 0, "the file is empty")]
        return None
    header = tuple(cell.strip() for cell in rows[0][1])
    first_column: dict[str, int] = {}
    for place, name in enumerate(header):
        if name.casefold() in READ and name.casefold() in first_column:
            problems.append(Problem("", rows[0][0], f"the column {name!r} occurs twice"))
        first_column.setdefault(name.casefold(), place)
    body = [(line, _fit_row(row, len(header), line, problems)) for line, row in rows[1:]]
    return Table(
        header=header,
        rows=tuple(row for _, row in body),
        lines=tuple(line for line, _ in body),
        shape=shape,
    )


def read_table_bytes(path: Path) -> bytes:
    """Read at most MAX_TABLE_BYTES + 1 bytes; LabError if it is not a file or cannot be read."""
    try:
        if not path.is_file():
            raise FileNotFoundError(ENOENT, "there is no such file")
        with path.open("rb") as file:
            return file.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise make_read_error(path, error) from error


def make_table_error(where: str, problems: Sequence[Problem]) -> ConfigError:
    """Return the error for a table with these problems, in the order of its lines."""
    why = "nothing was imported and nothing was changed"
    hint = "fix these lines and try again" if any(problem.line for problem in problems) else FORM
    return make_problems_error(where, problems, why=why, hint=hint)


def _decode(data: bytes, problems: list[Problem]) -> tuple[str, str, bytes] | None:
    bom = next((mark for mark in _BOMS if data.startswith(mark)), b"")
    encoding = _BOMS.get(bom) or _guess_encoding(data)
    try:
        text = data[len(bom) :].decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[min(error.start, len(data) - 1)]
        message = f"byte {byte:#04x} is not {encoding.upper()}; save the file as CSV UTF-8"
        problems.append(Problem("", line, message))
        return None
    if "\x00" in text:
        line = text.count("\n", 0, text.index("\x00")) + 1
        problems.append(Problem("", line, "a zero byte: this is not a text file"))
        return None
    return text, encoding, bom


def _guess_encoding(data: bytes) -> str:
    """Guess the encoding of data without a byte order mark.

    UTF-16 has a zero byte in almost every other place.
    """
    head = data[:200]
    if len(head) >= 4 and head[1::2].count(0) > len(head) // 3:
        return "utf-16-le"
    if len(head) >= 4 and head[0::2].count(0) > len(head) // 3:
        return "utf-16-be"
    return "utf-8"


def _find_delimiter(text: str) -> tuple[int, str, str]:
    """Return the skipped lines, the separator, and the remaining text.

    The separator is that of a `sep=;` on top, or the one that the header has most of.
    """
    first, _, rest = text.partition("\n")
    directive = first.strip().casefold()
    if directive.startswith("sep=") and directive[4:] in DELIMITERS:
        return 1, directive[4:], rest
    line = next((line for line in text.split("\n") if line.strip()), "")
    outside = "".join(line.split('"')[::2])
    return 0, max(DELIMITERS, key=outside.count), text


def _read_rows(
    text: str, delimiter: str, skipped: int, problems: list[Problem]
) -> list[tuple[int, list[str]]]:
    """Return (line number, cells) of every row that is not empty."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[tuple[int, list[str]]] = []
    line = 1 + skipped
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append((line, row))
            line = reader.line_num + 1 + skipped
            if len(rows) > MAX_ROWS:
                problems.append(Problem("", line, f"more than {MAX_ROWS} rows"))
                return rows
    except csv.Error as error:
        message = str(error)
        # csv has one class for all its errors.
        message = "a quotation mark is not closed" if "unexpected end" in message else message
        problems.append(Problem("", line, message))
    return rows


def _fit_row(row: list[str], width: int, line: int, problems: list[Problem]) -> tuple[str, ...]:
    """Return the row with as many cells as the header; report a row with more or fewer."""
    while len(row) > width and not row[-1].strip():
        row = row[:-1]
    if len(row) != width:
        problems.append(Problem("", line, f"{len(row)} cells, but the header has {width}"))
    return tuple([*row, *[""] * width][:width])

"""Grades written back into the table that the roster came from.

It has the encoding, separator and line ends of the one that came, its identity columns byte for
byte, and of the grades only the one assignment: no other is touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from labctl.config.document import plain
from labctl.courses.records import roster_formats
from labctl.courses.records.gradebook import Grade, points_text
from labctl.courses.records.tables import Shape, Table
from labctl.errors import UsageError
from labctl.model import Value

CANVAS_IDENTITY = (
    *("Student", "ID", "SIS User ID", "SIS Login ID", "Integration ID", "Root Account", "Section"),
)
MOODLE_IDENTITY = (
    *("First name", *roster_formats.SURNAME, "ID number", "Institution", "Department", "Username"),
    *roster_formats.MAIL,
)
CLASSROOM = (
    *("assignment_name", "github_username", "roster_identifier"),
    *("points_awarded", "points_available"),
)
NBGRADER = (
    *("assignment", "duedate", "timestamp", "student_id", "last_name", "first_name", "email"),
    *("raw_score", "late_submission_penalty", "score", "max_score"),
)
PLAIN = (
    *("assignment", "student", "team", "score", "penalty_percent", "final", "points"),
    *("received", "late_s", "problem"),
)
Rows = list[Sequence[str]]


class Written(Value, frozen=True):
    """The table, and what a person should know before handing it in."""

    data: bytes
    format: str
    notes: tuple[str, ...] = ()


class _Marks(Value, frozen=True):
    """By the table's own keys: the grade, and the text that is written for it."""

    assignment: str
    graded: dict[str, Grade]
    texts: dict[str, str]


def write_back(
    table: Table,
    name: str,
    assignment: str,
    grades: Sequence[Grade],
    keys: Mapping[str, str],
    *,
    to: str = "",
    penalty: bool = True,
) -> Written:
    """The grades in the format `to` (that of the table, `name`, if ""), in the table's own shape.

    `keys` maps the table's own keys to students' ids. UsageError where the table's rows cannot be
    those of `to`: identities are never made up.
    """
    to = to or name
    if to not in (name, "csv"):
        raise UsageError(
            f"the roster came from {name}, so grades cannot be written for {to}",
            why=f"{to}'s own columns, by which it knows its students, are not in it",
            hint=f"labctl course grades {assignment} --format {name}   # or csv",
        )
    if to == "csv" and name != "csv":
        return Written(data=_plain(grades, assignment, penalty), format="csv")
    by_student = {one.student: one for one in grades}
    graded = {key: by_student[owner] for key, owner in keys.items() if owner in by_student}
    texts = {key: points_text(one.final if penalty else one.score) for key, one in graded.items()}
    rows, notes = _WRITERS[to](table, _Marks(assignment=assignment, graded=graded, texts=texts))
    there = {keys.get(one.key) for one in roster_formats.read_people(table, name, [])}
    missing = sorted(one for one in by_student if one not in there)
    if missing:
        listed = ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else "")
        notes.append(f"not in the newest roster, and so not written: {listed}")
    return Written(data=table.shape.write(rows), format=to, notes=tuple(notes))


def _column_of(table: Table, assignment: str, around: str) -> int:
    """The index of the only column that is the assignment's; `around` is a pattern with NAME."""
    words = r"[\s_-]*".join(re.findall(r"[a-z]+|[0-9]+", assignment))
    pattern = re.compile(around.replace("NAME", words), re.IGNORECASE)
    fits = [i for i, head in enumerate(table.header) if pattern.fullmatch(head)]
    return fits[0] if len(fits) == 1 else -1


def _identity(table: Table, names: Iterable[str]) -> list[int]:
    return sorted(table.column(one) for one in names if table.has(one))


def _canvas(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """Canvas knows an assignment by the number behind its name, and takes part of its own rows.

    Who has no grade keeps what was in the export.
    """
    identity = _identity(table, CANVAS_IDENTITY)
    column = _column_of(table, marks.assignment, r"NAME(\s*\(\d+\))?")
    head = table.header[column] if column >= 0 else marks.assignment
    points = next((points_text(one.points) for one in marks.graded.values()), "")
    rows: Rows = [[*(table.header[i] for i in identity), head]]
    for row, cells in enumerate(table.rows):
        key = table.cell(row, "ID")
        own = [cells[i] for i in identity]
        before = cells[column] if column >= 0 else ""
        if table.cell(row, "Student").casefold().startswith(roster_formats.POINTS_POSSIBLE):
            rows.append([*own, before.strip() or points])
        elif key in marks.graded:
            rows.append([*own, marks.texts[key] or before])
    if column >= 0:
        return rows, []
    said = (
        f"the export has no one column {marks.assignment} (NUMBER), so Canvas will offer to make a "
        "new assignment; to fill an existing one, export the gradebook with it, then "
        "labctl course roster FILE"
    )
    return rows, [said]


def _moodle(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """A worksheet is filled in; else the identity columns and the grade item's."""
    if table.has("Identifier", "Grade"):
        return _filled(table, "Grade", marks.texts, lambda row: table.cell(row, "Identifier")), []
    column = _column_of(table, marks.assignment, r"([^:]*:\s*)?NAME(\s*\([^)]*\))?")
    identity = _identity(table, MOODLE_IDENTITY)
    head = table.header[column] if column >= 0 else marks.assignment
    rows: Rows = [[*(table.header[i] for i in identity), head]]
    for row, cells in enumerate(table.rows):
        key = table.cell(row, *roster_formats.MAIL) or table.cell(row, "ID number")
        if key in marks.graded:
            before = cells[column] if column >= 0 else ""
            rows.append([*(cells[i] for i in identity), marks.texts[key] or before])
    said = f"the export has no one column for {marks.assignment}: map it by hand in Moodle's import"
    return rows, [] if column >= 0 else [said]


def _classroom(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """The columns of GitHub Classroom's own export of grades."""
    rows: Rows = [CLASSROOM]
    for key, row in _firsts(table, ("identifier", "roster_identifier"), marks):
        user = table.cell(row, "github_username")
        points = points_text(marks.graded[key].points)
        rows.append((marks.assignment, user, key, marks.texts[key], points))
    return rows, []


def _nbgrader(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """The columns of nbgrader's own export."""
    rows: Rows = [NBGRADER]
    for key, row in _firsts(table, ("id", "student_id"), marks):
        one = marks.graded[key]
        person = [table.cell(row, name) for name in ("last_name", "first_name", "email")]
        off = "" if one.score is None else points_text(min(one.off, one.score))
        score = [points_text(one.score), off, marks.texts[key], points_text(one.points)]
        rows.append([marks.assignment, "", one.stamp.received, key, *person, *score])
    return rows, []


def _csv(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """The table as it came, and a column with the assignment's name."""

    def key(row: int) -> str:
        return next(filter(None, (table.cell(row, one) for one in ("id", "email", "name"))), "")

    if table.has(marks.assignment):
        return _filled(table, marks.assignment, marks.texts, key), []
    rows: Rows = [[*table.header, marks.assignment]]
    rows += [[*cells, marks.texts.get(key(row), "")] for row, cells in enumerate(table.rows)]
    return rows, []


def _firsts(table: Table, columns: Sequence[str], marks: _Marks) -> Iterable[tuple[str, int]]:
    """(key, row) of everybody who has a grade, at the first row that is theirs."""
    found: dict[str, int] = {}
    for row in range(len(table.rows)):
        found.setdefault(table.cell(row, *columns), row)
    return [(key, row) for key, row in found.items() if key in marks.graded]


def _filled(table: Table, column: str, texts: Mapping[str, str], key: Callable[[int], str]) -> Rows:
    """The whole table with one of its columns filled in where there is a grade."""
    place = table.column(column)
    rows: Rows = [table.header]
    for row, cells in enumerate(table.rows):
        text = texts.get(key(row), "")
        rows.append([text or cell if i == place else cell for i, cell in enumerate(cells)])
    return rows


def _plain(grades: Iterable[Grade], assignment: str, penalty: bool) -> bytes:
    """Everything that is known, by labctl's own ids."""
    rows: Rows = [PLAIN]
    for one in grades:
        final = points_text(one.final if penalty else one.score)
        percent, late_s = str(one.stamp.penalty), str(one.stamp.late_s)
        about = (assignment, one.student, one.team, points_text(one.score), percent, final)
        rest = (points_text(one.points), one.stamp.received, late_s, plain(one.problem))
        rows.append((*about, *rest))
    return Shape().write(rows)


_WRITERS: dict[str, Callable[[Table, _Marks], tuple[Rows, list[str]]]] = {
    "canvas": _canvas,
    "moodle": _moodle,
    "classroom": _classroom,
    "nbgrader": _nbgrader,
    "csv": _csv,
}

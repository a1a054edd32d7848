"""Writing grades into the table that the roster came from.

The result has the encoding, separator and line ends of the import, its identity columns byte for
byte, and the grades of this assignment only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from labctl.config.document import escape
from labctl.courses.records import roster_formats
from labctl.courses.records.gradebook import Grade, points_text
from labctl.courses.records.tables import Table, TableShape
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
# What a learning platform reads as excused; with the others, the cell stays as it was.
EXCUSED = {"canvas": "EX"}
Rows = list[Sequence[str]]


class GradeExport(Value, frozen=True):
    """The table with grades, and notes to read before uploading it.

    `held_back` are the students without a score there, since their marks are for an older
    submission.
    """

    data: bytes
    format: str
    notes: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()


class _Marks(Value, frozen=True):
    """The grades of an assignment and the texts to write for them, by the table's own keys."""

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
    rubric: bool = False,
    dropped: Mapping[str, str] | None = None,
) -> GradeExport:
    """Return the grades in the format `to`, by default that of the table, in the table's shape.

    `name` is the table's format; `keys` maps its keys to students' ids. UsageError if the table
    lacks the identity columns of `to`: they are never invented. `rubric` writes labctl's own table
    as csv, with the marks. It says why grades are `dropped`, unless that is None; a learning
    platform gets every grade, since it computes totals by rules of its own.
    """
    to = to or name
    if to not in (name, "csv"):
        also_csv = "" if name == "csv" else "   # or csv"
        raise UsageError(
            f"the roster came from {name}, so grades cannot be written for {to}",
            why=f"it lacks the columns by which {to} identifies students",
            hint=f"labctl course grades {assignment} --format {name}{also_csv}\n"
            f"labctl course roster FILE   # an export from {to}, to get these columns",
        )
    if to == "csv" and (rubric or name != "csv"):
        return GradeExport(data=_write_plain(grades, assignment, penalty, dropped), format="csv")
    by_student = {grade.student: grade for grade in grades}
    graded = {key: by_student[owner] for key, owner in keys.items() if owner in by_student}
    excused = EXCUSED.get(to, "")
    texts = {
        key: excused if grade.excused else points_text(grade.final if penalty else grade.score)
        for key, grade in graded.items()
    }
    rows, notes = _WRITERS[to](table, _Marks(assignment=assignment, graded=graded, texts=texts))
    listed_ids = {keys.get(person.key) for person in roster_formats.read_people(table, name, [])}
    missing = sorted(student for student in by_student if student not in listed_ids)
    if missing:
        listed = ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else "")
        notes.append(f"not in the newest roster, so not written: {listed}")
    return GradeExport(data=table.shape.write(rows), format=to, notes=tuple(notes))


def _find_column(table: Table, assignment: str, name_pattern: str) -> int:
    """Return the index of the assignment's only column, or -1; `name_pattern` contains NAME."""
    words = r"[\s_-]*".join(re.findall(r"[a-z]+|[0-9]+", assignment))
    pattern = re.compile(name_pattern.replace("NAME", words), re.IGNORECASE)
    fits = [i for i, head in enumerate(table.header) if pattern.fullmatch(head)]
    return fits[0] if len(fits) == 1 else -1


def _identity_columns(table: Table, names: Iterable[str]) -> list[int]:
    return sorted(table.column(name) for name in names if table.has_columns(name))


def _write_canvas(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """Return the rows for Canvas, which identifies an assignment by the number after its name.

    Students without a grade keep the value of the export.
    """
    identity = _identity_columns(table, CANVAS_IDENTITY)
    column = _find_column(table, marks.assignment, r"NAME(\s*\(\d+\))?")
    head = table.header[column] if column >= 0 else marks.assignment
    points = next((points_text(grade.points) for grade in marks.graded.values()), "")
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
    note = (
        f"the export has no single column {marks.assignment} (NUMBER), so Canvas will offer to "
        "create a new assignment; to fill an existing one, export the gradebook with it, then "
        "labctl course roster FILE"
    )
    return rows, [note]


def _write_moodle(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """Return the rows for Moodle: a filled worksheet, or identity columns and the grade."""
    if table.has_columns("Identifier", "Grade"):
        return _fill_column(
            table, "Grade", marks.texts, lambda row: roster_formats.find_moodle_key(table, row)
        ), []
    column = _find_column(table, marks.assignment, r"([^:]*:\s*)?NAME(\s*\([^)]*\))?")
    identity = _identity_columns(table, MOODLE_IDENTITY)
    head = table.header[column] if column >= 0 else marks.assignment
    rows: Rows = [[*(table.header[i] for i in identity), head]]
    for row, cells in enumerate(table.rows):
        key = roster_formats.find_moodle_key(table, row)
        if key in marks.graded:
            before = cells[column] if column >= 0 else ""
            rows.append([*(cells[i] for i in identity), marks.texts[key] or before])
    note = f"the export has no single column for {marks.assignment}: map it in Moodle's import"
    return rows, [] if column >= 0 else [note]


def _write_classroom(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """Return the rows in the format of GitHub Classroom's grade export."""
    rows: Rows = [CLASSROOM]
    for key, row in _list_first_rows(table, ("identifier", "roster_identifier"), marks):
        user = table.cell(row, "github_username")
        points = points_text(marks.graded[key].points)
        rows.append((marks.assignment, user, key, marks.texts[key], points))
    return rows, []


def _write_nbgrader(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """Return the rows in the format of nbgrader's export."""
    rows: Rows = [NBGRADER]
    for key, row in _list_first_rows(table, ("id", "student_id"), marks):
        grade = marks.graded[key]
        person = [table.cell(row, name) for name in ("last_name", "first_name", "email")]
        penalty_points = (
            "" if grade.score is None else points_text(min(grade.penalty_points, grade.score))
        )
        score = [
            points_text(grade.score),
            penalty_points,
            marks.texts[key],
            points_text(grade.points),
        ]
        rows.append([marks.assignment, "", grade.stamp.received, key, *person, *score])
    return rows, []


def _write_csv(table: Table, marks: _Marks) -> tuple[Rows, list[str]]:
    """Return the table as imported, with a column for the assignment."""

    def key_of(row: int) -> str:
        names = ("id", "email", "name")
        return next(filter(None, (table.cell(row, name) for name in names)), "")

    if table.has_columns(marks.assignment):
        return _fill_column(table, marks.assignment, marks.texts, key_of), []
    rows: Rows = [[*table.header, marks.assignment]]
    rows += [[*cells, marks.texts.get(key_of(row), "")] for row, cells in enumerate(table.rows)]
    return rows, []


def _list_first_rows(
    table: Table, columns: Sequence[str], marks: _Marks
) -> Iterable[tuple[str, int]]:
    """Return (key, row) for each student with a grade, at their first row."""
    first_rows: dict[str, int] = {}
    for row in range(len(table.rows)):
        first_rows.setdefault(table.cell(row, *columns), row)
    return [(key, row) for key, row in first_rows.items() if key in marks.graded]


def _fill_column(
    table: Table, column: str, texts: Mapping[str, str], key: Callable[[int], str]
) -> Rows:
    """Return the whole table with one column filled in where there is a grade."""
    place = table.column(column)
    rows: Rows = [table.header]
    for row, cells in enumerate(table.rows):
        text = texts.get(key(row), "")
        rows.append([text or cell if i == place else cell for i, cell in enumerate(cells)])
    return rows


def _write_plain(
    grades: Iterable[Grade],
    assignment: str,
    penalty: bool,
    dropped: Mapping[str, str] | None = None,
) -> bytes:
    """Return labctl's own CSV of the grades, by students' ids."""
    grades = list(grades)
    names = [item.name for grade in grades[:1] for item in grade.items]
    columns = [column for name in names for column in (name, f"{name}_by")]
    extra = () if dropped is None else ("dropped",)
    rows: Rows = [(*PLAIN, *columns, *extra)]
    for grade in grades:
        final = points_text(grade.final if penalty else grade.score)
        percent, late_s = str(grade.stamp.penalty), str(grade.stamp.late_s)
        first = (assignment, grade.student, grade.team, points_text(grade.score), percent, final)
        last = (points_text(grade.points), grade.stamp.received, late_s, escape(grade.problem))
        marks = [item.mark for item in grade.items]
        given = [
            cell
            for mark in marks
            for cell in ((points_text(mark.points), escape(mark.by)) if mark else ("", ""))
        ]
        reasons = () if dropped is None else (dropped.get(grade.student, ""),)
        rows.append((*first, *last, *given, *reasons))
    return TableShape().write(rows)


_WRITERS: dict[str, Callable[[Table, _Marks], tuple[Rows, list[str]]]] = {
    "canvas": _write_canvas,
    "moodle": _write_moodle,
    "classroom": _write_classroom,
    "nbgrader": _write_nbgrader,
    "csv": _write_csv,
}

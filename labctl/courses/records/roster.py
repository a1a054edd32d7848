"""roster.csv: labctl's own form of who is in a course. Every bad line is told, none is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from labctl.config.document import shown
from labctl.config.identity import write_private
from labctl.courses.records import roster_checks
from labctl.courses.records.student import Student
from labctl.courses.records.tables import Shape, Table, read_some, read_table, wrong
from labctl.errors import NotFoundError, Problem

ROSTER_FILE = "roster.csv"
# Of roster.csv; only `id` must be there.
COLUMNS = ("id", "name", "email", "team", "section", "active")
YES, NO = ("", "yes", "true", "1"), ("no", "false", "0")


def read_roster(path: Path) -> list[Student]:
    """The students of a roster.csv, in its order. ConfigError with every bad line."""
    if not path.exists():
        raise NotFoundError(
            f"there is no {path.name} in {path.parent}",
            hint=f"labctl -C {path.parent} course roster FILE",
        )
    return parse_roster(read_some(path), str(path))


def parse_roster(data: bytes, where: str) -> list[Student]:
    """The students of such a file's bytes; ConfigError, under the name `where`."""
    problems: list[Problem] = []
    table = read_table(data, problems)
    if table is None or not table.has("id"):
        problems += [] if problems else [Problem("", 1, "there is no column `id`")]
        raise wrong(where, problems)
    for name in table.header:
        if name.casefold() not in COLUMNS:
            problems.append(Problem("", 1, f"unknown column {shown(name)}: {', '.join(COLUMNS)}"))
    students = [_student(table, row, problems) for row in range(len(table.rows))]
    roster_checks.across(students, table.lines, problems)
    if problems:
        raise wrong(where, problems)
    return students


def roster_bytes(students: Iterable[Student]) -> bytes:
    """The file of these students: `parse_roster` reads the same from it."""
    rows = [
        (one.id, one.name, one.email, one.team, one.section, "yes" if one.active else "no")
        for one in students
    ]
    return Shape().write([COLUMNS, *rows])


def write_roster(path: Path, students: Iterable[Student]) -> None:
    """Replace the file whole, for its owner alone."""
    write_private(path, roster_bytes(students))


def _student(table: Table, row: int, problems: list[Problem]) -> Student:
    found = Student(
        id=table.cell(row, "id"),
        name=table.cell(row, "name"),
        email=table.cell(row, "email"),
        team=table.cell(row, "team"),
        section=table.cell(row, "section"),
        active=table.cell(row, "active").casefold() not in NO,
    )
    said = [
        roster_checks.id_problem(found.id),
        roster_checks.name_problem(found.name),
        roster_checks.name_problem(found.section),
        roster_checks.email_problem(found.email),
        f"team: {roster_checks.id_problem(found.team)}"
        if roster_checks.id_problem(found.team or "x")
        else "",
        ""
        if table.cell(row, "active").casefold() in (*YES, *NO)
        else f"active is yes or no, not {shown(table.cell(row, 'active'))}",
    ]
    problems += [Problem("", table.lines[row], one) for one in said if one]
    return found

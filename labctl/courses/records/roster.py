"""roster.csv: the students of a course. Every bad line is an error, none is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from labctl.config.document import quote
from labctl.config.identity import write_private
from labctl.courses.records import roster_checks
from labctl.courses.records.student import Student
from labctl.courses.records.tables import (
    Table,
    TableShape,
    make_table_error,
    read_table,
    read_table_bytes,
)
from labctl.errors import NotFoundError, Problem

ROSTER_FILE = "roster.csv"
# Columns of roster.csv; only `id` is required.
COLUMNS = ("id", "name", "email", "team", "section", "active")
YES, NO = ("", "yes", "true", "1"), ("no", "false", "0")


def read_roster(path: Path) -> list[Student]:
    """Read the students of a roster.csv, in its order. ConfigError lists every bad line."""
    if not path.exists():
        raise NotFoundError(
            f"there is no {path.name} in {path.parent}",
            hint=f"labctl -C {path.parent} course roster FILE",
        )
    return parse_roster(read_table_bytes(path), str(path))


def parse_roster(data: bytes, where: str) -> list[Student]:
    """Parse the bytes of a roster.csv; a ConfigError names the file as `where`."""
    problems: list[Problem] = []
    table = read_table(data, problems)
    if table is None or not table.has_columns("id"):
        problems += [] if problems else [Problem("", 1, "the column `id` is missing")]
        raise make_table_error(where, problems)
    for name in table.header:
        if name.casefold() not in COLUMNS:
            problems.append(Problem("", 1, f"unknown column {quote(name)}: {', '.join(COLUMNS)}"))
    students = [_parse_student(table, row, problems) for row in range(len(table.rows))]
    roster_checks.check_duplicates(students, table.lines, problems)
    if problems:
        raise make_table_error(where, problems)
    return students


def roster_bytes(students: Iterable[Student]) -> bytes:
    """Return the roster.csv of these students; `parse_roster` reads them back."""
    rows = [
        (
            student.id,
            student.name,
            student.email,
            student.team,
            student.section,
            "yes" if student.active else "no",
        )
        for student in students
    ]
    return TableShape().write([COLUMNS, *rows])


def write_roster(path: Path, students: Iterable[Student]) -> None:
    """Replace the file atomically, readable only by its owner."""
    write_private(path, roster_bytes(students))


def _parse_student(table: Table, row: int, problems: list[Problem]) -> Student:
    student = Student(
        id=table.cell(row, "id"),
        name=table.cell(row, "name"),
        email=table.cell(row, "email"),
        team=table.cell(row, "team"),
        section=table.cell(row, "section"),
        active=table.cell(row, "active").casefold() not in NO,
    )
    messages = [
        roster_checks.id_problem(student.id),
        roster_checks.name_problem(student.name),
        roster_checks.name_problem(student.section),
        roster_checks.email_problem(student.email),
        f"team: {roster_checks.id_problem(student.team)}"
        if roster_checks.id_problem(student.team or "x")
        else "",
        ""
        if table.cell(row, "active").casefold() in (*YES, *NO)
        else f"active must be yes or no, not {quote(table.cell(row, 'active'))}",
    ]
    problems += [Problem("", table.lines[row], message) for message in messages if message]
    return student

"""Recognizing a course system's table by its header, and reading the people in it.

| format | recognized by |
|---|---|
| canvas | Student, ID, and SIS Login ID, SIS User ID or Section: the gradebook's export |
| moodle | First name, Last name or Surname, Email address; a worksheet: Identifier, Full name |
| classroom | identifier (or roster_identifier), github_username |
| nbgrader | id (or student_id) with first_name, last_name or lms_user_id |
| csv | id, email or name; team and section if they are there |
"""

from __future__ import annotations

import re
from collections.abc import Callable

from labctl.config.document import quote
from labctl.courses.records import roster_checks
from labctl.courses.records.student import SECTION_SEPARATOR
from labctl.courses.records.tables import Table
from labctl.errors import Problem, UsageError
from labctl.model import Value

POINTS_POSSIBLE = "points possible"
# what Moodle writes of a participant who is in no group
NO_GROUPS = "no groups"
_TEST_STUDENT = re.compile(r"student,\s*test|test student", re.IGNORECASE)
CANVAS_IDENTITY = ("SIS Login ID", "SIS User ID", "Section")
SURNAME = ("Last name", "Surname")
MAIL = ("Email address", "Email")


class ImportedPerson(Value, frozen=True):
    """One person as a course system lists them.

    `key` is the system's own unique key. An id is derived from `login`; if it is `exact`, it is the
    id.
    """

    key: str
    login: str
    name: str
    line: int
    email: str = ""
    team: str = ""
    section: str = ""
    exact: bool = False


def detect_format(table: Table) -> str:
    """Return the name of the table's format, or "" if it is unknown."""
    return next((name for name, (fits, _) in _FORMATS.items() if fits(table)), "")


def read_people(table: Table, name: str, problems: list[Problem]) -> list[ImportedPerson]:
    """Read the people in the table, in its order, each once; bad rows go to `problems`.

    UsageError if the table does not have that format.
    """
    fits, read_person = _FORMATS[name]
    if not fits(table):
        raise UsageError(
            f"this is not a table from {name}",
            why=f"its columns are {', '.join(table.header[:8])}",
            hint="omit --format: labctl recognizes the format from the header",
        )
    people: dict[str, ImportedPerson] = {}
    mails: dict[str, ImportedPerson] = {}
    repeats = table.column("assignment_name", "assignment") >= 0
    for row in range(len(table.rows)):
        if name == "canvas" and _is_no_student(table, row):
            continue
        person = read_person(table, row)
        before = len(problems)
        problems += [
            Problem("", person.line, message) for message in _find_problems(person) if message
        ]
        if len(problems) > before:
            continue
        if person.key in people:
            if not repeats:
                message = f"{quote(person.key)} is already on line {people[person.key].line}"
                problems.append(Problem("", person.line, message))
            continue
        mail = person.email.casefold()
        if mail and mail in mails:
            message = f"the address {quote(person.email)} is already on line {mails[mail].line}"
            problems.append(Problem("", person.line, message))
            continue
        people[person.key] = person
        mails[mail] = person
    return list(people.values())


def _find_problems(person: ImportedPerson) -> list[str]:
    messages = [
        roster_checks.name_problem(person.name),
        roster_checks.name_problem(person.section),
        roster_checks.email_problem(person.email),
        roster_checks.name_problem(person.team),
        roster_checks.id_problem(person.login)
        if person.exact
        else roster_checks.login_problem(person.login),
    ]
    if not person.key:
        messages = ["this row has no id, name or mail address"]
    elif (
        not any(messages)
        and not person.exact
        and not roster_checks.derive_id(person.login or person.name)
    ):
        messages.append(
            f"cannot derive an id from {quote(person.login or person.name)}; add an `id` column"
        )
    if person.team and not roster_checks.derive_id(person.team):
        messages.append(f"{quote(person.team)} cannot be a team's name")
    return messages


def _is_no_student(table: Table, row: int) -> bool:
    """Tell whether a row of Canvas is not a student: points, posting rules, the test student."""
    student = table.cell(row, "Student")
    if student.casefold().startswith(POINTS_POSSIBLE):
        return True
    if not student:
        return not table.cell(row, "ID")
    return bool(_TEST_STUDENT.fullmatch(student)) and not table.cell(row, "SIS User ID")


def _is_canvas(table: Table) -> bool:
    return table.has_columns("Student", "ID") and any(
        table.has_columns(name) for name in CANVAS_IDENTITY
    )


def _is_worksheet(table: Table) -> bool:
    return table.has_columns("Identifier", "Full name")


def _is_moodle(table: Table) -> bool:
    has_names = table.has_columns("First name") and table.column(*SURNAME) >= 0
    return (has_names and table.column(*MAIL) >= 0) or _is_worksheet(table)


def _is_classroom(table: Table) -> bool:
    return (
        table.has_columns("github_username")
        and table.column("identifier", "roster_identifier") >= 0
    )


def _is_nbgrader(table: Table) -> bool:
    has_names = table.column("first_name", "last_name", "lms_user_id") >= 0
    return table.column("id", "student_id") >= 0 and has_names


def _is_csv(table: Table) -> bool:
    return table.column("id", "email", "name") >= 0


def reorder_name(name: str) -> str:
    """Return `Last, First` as `First Last`."""
    last, comma, first = name.partition(",")
    return f"{first.strip()} {last.strip()}".strip() if comma else name


def _read_team(table: Table, row: int) -> str:
    return table.cell(row, "team", "group")


def split_canvas_sections(text: str) -> list[str]:
    """Return the sections in a cell of Canvas: `A`, `A and B`, or `A, B, and C`."""
    if " and " not in text:
        return [text] if text else []
    return [name for name in re.split(r",? and |, ", text) if name]


def _read_canvas_row(table: Table, row: int) -> ImportedPerson:
    login = table.cell(row, "SIS Login ID")
    return ImportedPerson(
        key=table.cell(row, "ID"),
        login=login,
        name=reorder_name(table.cell(row, "Student")),
        line=table.lines[row],
        email=login if "@" in login else table.cell(row, "Email"),
        team=_read_team(table, row),
        section=SECTION_SEPARATOR.join(split_canvas_sections(table.cell(row, "Section"))),
    )


def split_moodle_groups(text: str) -> list[str]:
    """Return the groups in a cell of Moodle's participants: `A, B`; [] for "No groups"."""
    names = (name.strip() for name in text.split(","))
    return [name for name in names if name and name.casefold() != NO_GROUPS]


def _read_moodle_sections(table: Table, row: int) -> str:
    groups = split_moodle_groups(table.cell(row, "Groups"))
    return SECTION_SEPARATOR.join(groups) or table.cell(row, "Section", "Department")


def find_moodle_key(table: Table, row: int) -> str:
    """Return what identifies a person of Moodle: if possible the email address.

    A grading worksheet has a number too, which Moodle assigns anew for each assignment.
    """
    named = (table.cell(row, name) for name in ("Identifier", "ID number"))
    return table.cell(row, *MAIL) or next(filter(None, named), "")


def _read_moodle_row(table: Table, row: int) -> ImportedPerson:
    email = table.cell(row, *MAIL)
    full_name = f"{table.cell(row, 'First name')} {table.cell(row, *SURNAME)}".strip()
    return ImportedPerson(
        key=find_moodle_key(table, row),
        login=table.cell(row, "Username") or email,
        name=table.cell(row, "Full name") or full_name,
        line=table.lines[row],
        email=email,
        team=_read_team(table, row),
        section=_read_moodle_sections(table, row),
    )


def _read_classroom_row(table: Table, row: int) -> ImportedPerson:
    key = table.cell(row, "identifier", "roster_identifier")
    user = table.cell(row, "github_username")
    is_login = not roster_checks.login_problem(key)
    return ImportedPerson(
        key=key,
        login=user or (key if is_login else ""),
        name=table.cell(row, "name") or (key if "@" not in key else ""),
        line=table.lines[row],
        email=key if "@" in key else "",
        team=_read_team(table, row),
    )


def _read_nbgrader_row(table: Table, row: int) -> ImportedPerson:
    key = table.cell(row, "id", "student_id")
    full_name = f"{table.cell(row, 'first_name')} {table.cell(row, 'last_name')}".strip()
    return ImportedPerson(
        key=key,
        login=key,
        name=full_name,
        line=table.lines[row],
        email=table.cell(row, "email"),
        team=_read_team(table, row),
        section=table.cell(row, "section"),
    )


def _read_csv_row(table: Table, row: int) -> ImportedPerson:
    own, email, name = (table.cell(row, column) for column in ("id", "email", "name"))
    return ImportedPerson(
        key=own or email or name,
        login=own if table.has_columns("id") else email,
        name=reorder_name(name),
        line=table.lines[row],
        email=email,
        team=_read_team(table, row),
        section=table.cell(row, "section"),
        exact=table.has_columns("id"),
    )


_FORMATS: dict[str, tuple[Callable[[Table], bool], Callable[[Table, int], ImportedPerson]]] = {
    "canvas": (_is_canvas, _read_canvas_row),
    "moodle": (_is_moodle, _read_moodle_row),
    "classroom": (_is_classroom, _read_classroom_row),
    "nbgrader": (_is_nbgrader, _read_nbgrader_row),
    "csv": (_is_csv, _read_csv_row),
}

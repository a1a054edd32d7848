"""Whose table it is, by its header, and who stands in it.

| format | told by |
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

from labctl.config.document import shown
from labctl.courses.records import roster_checks
from labctl.courses.records.tables import Table
from labctl.errors import Problem, UsageError
from labctl.model import Value

POINTS_POSSIBLE = "points possible"
_TEST_STUDENT = re.compile(r"student,\s*test|test student", re.IGNORECASE)
CANVAS_IDENTITY = ("SIS Login ID", "SIS User ID", "Section")
SURNAME = ("Last name", "Surname")
MAIL = ("Email address", "Email")


class Imported(Value, frozen=True):
    """One person as a course system knows them.

    `key` is by what it tells them apart. `login` is what an id is made of; where it is `exact`, it
    is the id.
    """

    key: str
    login: str
    name: str
    line: int
    email: str = ""
    team: str = ""
    section: str = ""
    exact: bool = False


def sniff(table: Table) -> str:
    """The format's name, "" for none that is known."""
    return next((name for name, (fits, _) in _FORMATS.items() if fits(table)), "")


def names() -> tuple[str, ...]:
    return tuple(_FORMATS)


def read_people(table: Table, name: str, problems: list[Problem]) -> list[Imported]:
    """Everybody in the table, in its order, each once. Every bad row is a problem.

    UsageError where the table is not of that format.
    """
    fits, person = _FORMATS[name]
    if not fits(table):
        raise UsageError(
            f"this is no table as {name} writes it",
            why=f"its columns are {', '.join(table.header[:8])}",
            hint="leave --format out: it is told by the header",
        )
    found: dict[str, Imported] = {}
    mails: dict[str, Imported] = {}
    repeats = table.column("assignment_name", "assignment") >= 0
    for row in range(len(table.rows)):
        if name == "canvas" and _no_student(table, row):
            continue
        one = person(table, row)
        before = len(problems)
        problems += [Problem("", one.line, said) for said in _wrong(one) if said]
        if len(problems) > before:
            continue
        if one.key in found:
            if not repeats:
                said = f"{shown(one.key)} stands on line {found[one.key].line} already"
                problems.append(Problem("", one.line, said))
            continue
        mail = one.email.casefold()
        if mail and mail in mails:
            said = f"the address {shown(one.email)} stands on line {mails[mail].line} already"
            problems.append(Problem("", one.line, said))
            continue
        found[one.key] = one
        mails[mail] = one
    return list(found.values())


def _wrong(one: Imported) -> list[str]:
    said = [
        roster_checks.name_problem(one.name),
        roster_checks.name_problem(one.section),
        roster_checks.email_problem(one.email),
        roster_checks.name_problem(one.team),
        roster_checks.id_problem(one.login)
        if one.exact
        else roster_checks.login_problem(one.login),
    ]
    if not one.key:
        said = ["nothing in this row says who it is"]
    elif not any(said) and not one.exact and not roster_checks.derived(one.login or one.name):
        said.append(f"no id can be made of {shown(one.login or one.name)}; add an `id` column")
    if one.team and not roster_checks.derived(one.team):
        said.append(f"{shown(one.team)} cannot be a team's name")
    return said


def _no_student(table: Table, row: int) -> bool:
    """Canvas writes the points that there are, what is posted, and a test student as rows too."""
    student = table.cell(row, "Student")
    if student.casefold().startswith(POINTS_POSSIBLE):
        return True
    if not student:
        return not table.cell(row, "ID")
    return bool(_TEST_STUDENT.fullmatch(student)) and not table.cell(row, "SIS User ID")


def _is_canvas(table: Table) -> bool:
    return table.has("Student", "ID") and any(table.has(one) for one in CANVAS_IDENTITY)


def _is_worksheet(table: Table) -> bool:
    return table.has("Identifier", "Full name")


def _is_moodle(table: Table) -> bool:
    named = table.has("First name") and table.column(*SURNAME) >= 0
    return (named and table.column(*MAIL) >= 0) or _is_worksheet(table)


def _is_classroom(table: Table) -> bool:
    return table.has("github_username") and table.column("identifier", "roster_identifier") >= 0


def _is_nbgrader(table: Table) -> bool:
    named = table.column("first_name", "last_name", "lms_user_id") >= 0
    return table.column("id", "student_id") >= 0 and named


def _is_csv(table: Table) -> bool:
    return table.column("id", "email", "name") >= 0


def turned(name: str) -> str:
    """`Last, First` as `First Last`."""
    last, comma, first = name.partition(",")
    return f"{first.strip()} {last.strip()}".strip() if comma else name


def _team(table: Table, row: int) -> str:
    return table.cell(row, "team", "group")


def _canvas(table: Table, row: int) -> Imported:
    login = table.cell(row, "SIS Login ID")
    return Imported(
        key=table.cell(row, "ID"),
        login=login,
        name=turned(table.cell(row, "Student")),
        line=table.lines[row],
        email=login if "@" in login else table.cell(row, "Email"),
        team=_team(table, row),
        section=table.cell(row, "Section"),
    )


def _moodle(table: Table, row: int) -> Imported:
    email = table.cell(row, *MAIL)
    whole = f"{table.cell(row, 'First name')} {table.cell(row, *SURNAME)}".strip()
    return Imported(
        key=table.cell(row, "Identifier") or email or table.cell(row, "ID number"),
        login=table.cell(row, "Username") or email,
        name=table.cell(row, "Full name") or whole,
        line=table.lines[row],
        email=email,
        team=_team(table, row),
        section=table.cell(row, "Section", "Department"),
    )


def _classroom(table: Table, row: int) -> Imported:
    key = table.cell(row, "identifier", "roster_identifier")
    user = table.cell(row, "github_username")
    is_login = not roster_checks.login_problem(key)
    return Imported(
        key=key,
        login=user or (key if is_login else ""),
        name=table.cell(row, "name") or (key if "@" not in key else ""),
        line=table.lines[row],
        email=key if "@" in key else "",
        team=_team(table, row),
    )


def _nbgrader(table: Table, row: int) -> Imported:
    key = table.cell(row, "id", "student_id")
    whole = f"{table.cell(row, 'first_name')} {table.cell(row, 'last_name')}".strip()
    return Imported(
        key=key,
        login=key,
        name=whole,
        line=table.lines[row],
        email=table.cell(row, "email"),
        team=_team(table, row),
        section=table.cell(row, "section"),
    )


def _csv(table: Table, row: int) -> Imported:
    own, email, name = (table.cell(row, one) for one in ("id", "email", "name"))
    return Imported(
        key=own or email or name,
        login=own if table.has("id") else email,
        name=turned(name),
        line=table.lines[row],
        email=email,
        team=_team(table, row),
        section=table.cell(row, "section"),
        exact=table.has("id"),
    )


_FORMATS: dict[str, tuple[Callable[[Table], bool], Callable[[Table, int], Imported]]] = {
    "canvas": (_is_canvas, _canvas),
    "moodle": (_is_moodle, _moodle),
    "classroom": (_is_classroom, _classroom),
    "nbgrader": (_is_nbgrader, _nbgrader),
    "csv": (_is_csv, _csv),
}

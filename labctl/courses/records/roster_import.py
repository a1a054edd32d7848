"""A course system's table beside the roster that there is: who is new, who changed, who is gone.

An id, once given, stays: it is found again by the system's own key, then by the address for mail.
Nobody is taken out of the roster; who is gone becomes inactive, and that is shown first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from labctl.config.identity import write_private
from labctl.courses.records import roster_checks, roster_formats
from labctl.courses.records.roster_formats import Imported
from labctl.courses.records.student import Student
from labctl.courses.records.tables import Table, read_some, read_table, wrong
from labctl.errors import ConfigError, LabError, Problem
from labctl.model import Value

KEYS_FILE = "keys.json"
MOST_STUDENTS = 5000
FIELDS = ("name", "email", "team", "section")


class Keys(Value, frozen=True):
    """Format -> the key that it has for somebody -> the id that labctl gave them."""

    version: int = 1
    keys: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)


class Change(Value, frozen=True):
    """One student before and after."""

    before: Student
    after: Student

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(
            one
            for one in (*FIELDS, "active")
            if getattr(self.before, one) != getattr(self.after, one)
        )


class RosterDiff(Value, frozen=True):
    """What an import would do. `students` is the roster after it, in the order it will have."""

    format: str
    students: tuple[Student, ...]
    added: tuple[Student, ...] = ()
    changed: tuple[Change, ...] = ()
    returned: tuple[Student, ...] = ()
    left: tuple[Student, ...] = ()
    same: int = 0
    keys: Keys = Keys()

    @property
    def nothing(self) -> bool:
        return not (self.added or self.changed or self.returned or self.left)


def read_table_file(path: Path) -> tuple[bytes, Table]:
    """A file's bytes and the table in it; ConfigError with everything wrong in its form."""
    data = read_some(path)
    problems: list[Problem] = []
    table = read_table(data, problems)
    if table is None:
        raise wrong(str(path), problems)
    if problems:
        # Rows that do not fit the header are named together with what is wrong inside others.
        name = roster_formats.sniff(table)
        if name:
            roster_formats.read_people(table, name, problems)
        raise wrong(str(path), problems)
    return data, table


def compare(
    table: Table,
    where: str,
    known: Sequence[Student] = (),
    keys: Keys | None = None,
    format: str = "",
    *,
    keep: bool = False,
) -> RosterDiff:
    """What importing this table would change; ConfigError with every bad row.

    With `keep`, who is not in it stays as they are: it is a part of the course.
    """
    name = format or roster_formats.sniff(table)
    if not name:
        raise ConfigError(
            f"{where} is no roster that labctl knows",
            why=f"its columns are {', '.join(table.header[:8])}; it knows the exports of Canvas, "
            "Moodle, GitHub Classroom and nbgrader, and a CSV with `id`, `email` or `name`",
            hint="name the columns id, name, email, team, section",
        )
    problems: list[Problem] = []
    people = roster_formats.read_people(table, name, problems)
    if not people and not problems:
        problems.append(Problem("", 0, "nobody stands in it"))
    if len(people) > MOST_STUDENTS:
        problems.append(Problem("", 0, f"more than {MOST_STUDENTS} students"))
    if problems:
        raise wrong(where, problems)
    given = assign(people, known, (keys or Keys()).keys.get(name, {}))
    diff = _diff(name, people, given, known, keys or Keys(), keep=keep)
    lines = {given[one.key]: one.line for one in people}
    roster_checks.across(diff.students, [lines.get(one.id, 0) for one in diff.students], problems)
    if problems:
        raise wrong(where, problems)
    return diff


def assign(
    people: Sequence[Imported], known: Sequence[Student], keys: Mapping[str, str]
) -> dict[str, str]:
    """Key -> id. Ids that were given stay; a new one never is somebody else's."""
    ids = {one.id: one for one in known}
    mails = {one.email.casefold(): one.id for one in known if one.email}
    bound = set(keys.values())
    given: dict[str, str] = {}
    for one in people:
        mailed = mails.get(one.email.casefold(), "")
        if one.key in keys:
            given[one.key] = keys[one.key]
        elif one.exact:
            given[one.key] = one.login
        elif mailed and mailed not in bound:
            given[one.key] = mailed
    taken = set(ids) | set(given.values()) | bound
    for one in people:
        if one.key in given:
            continue
        wanted = roster_checks.derived(one.login or one.name)
        twin = ids.get(wanted)
        same = twin is not None and twin.name.casefold() == one.name.casefold()
        if same and wanted not in bound and wanted not in given.values():
            given[one.key] = wanted
            continue
        given[one.key] = _free(wanted, taken)
        taken.add(given[one.key])
    return given


def load_keys(path: Path) -> Keys:
    """Of a course's private folder; nothing where there is none yet."""
    file = path / KEYS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Keys)
    except FileNotFoundError:
        return Keys()
    except msgspec.MsgspecError:
        raise LabError(
            f"{file} is damaged",
            why="it says which id belongs to whom in the course's own system",
            hint=f"mv {file} {file}.old   # ids are then found by the addresses for mail",
        ) from None


def save_keys(path: Path, keys: Keys) -> None:
    write_private(path / KEYS_FILE, msgspec.json.encode(keys) + b"\n")


def _free(wanted: str, taken: set[str]) -> str:
    number, found = 2, wanted
    while found in taken:
        end = f"-{number}"
        found = f"{wanted[: 39 - len(end)].rstrip('-')}{end}"
        number += 1
    return found


def _diff(
    name: str,
    people: Sequence[Imported],
    given: Mapping[str, str],
    known: Sequence[Student],
    keys: Keys,
    *,
    keep: bool,
) -> RosterDiff:
    before = {one.id: one for one in known}
    after = {given[one.key]: _student(one, given[one.key], before) for one in people}
    gone = [] if keep else [one for one in known if one.active and one.id not in after]
    merged: dict[str, Student] = {}
    for old in known:
        new = after.get(old.id, old)
        left = old.active and old.id not in after and not keep
        merged[old.id] = msgspec.structs.replace(new, active=False) if left else new
    added = [one for one in after.values() if one.id not in before]
    pairs = [(before[one.id], one) for one in after.values() if one.id in before]
    own = {**keys.keys.get(name, {}), **given}
    return RosterDiff(
        format=name,
        students=(*merged.values(), *added),
        added=tuple(added),
        changed=tuple(Change(before=a, after=b) for a, b in pairs if a != b and a.active),
        returned=tuple(b for a, b in pairs if not a.active),
        left=tuple(gone),
        same=sum(a == b for a, b in pairs),
        keys=Keys(keys={**keys.keys, name: own}),
    )


def _student(one: Imported, student_id: str, before: Mapping[str, Student]) -> Student:
    """What the table does not say stays as it was."""
    old = before.get(student_id, Student(id=student_id))
    return Student(
        id=student_id,
        name=one.name or old.name,
        email=one.email or old.email,
        team=roster_checks.derived(one.team) if one.team else old.team,
        section=one.section or old.section,
    )

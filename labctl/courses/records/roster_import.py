"""Comparing a course system's table with the roster: who is new, who changed, who is gone.

An id never changes: a student is matched by the system's own key, then by the mail address. Nobody
is removed from the roster: students who are gone become inactive, which is shown first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from labctl.config.identity import write_private
from labctl.courses.records import roster_checks, roster_formats
from labctl.courses.records.roster_formats import ImportedPerson
from labctl.courses.records.student import Student
from labctl.courses.records.tables import Table, make_table_error, read_table, read_table_bytes
from labctl.decoding import decode_json
from labctl.errors import ConfigError, LabError, Problem
from labctl.model import Value

KEYS_FILE = "keys.json"
MOST_STUDENTS = 5000
# The number in a grading worksheet of Moodle. A student has another one in each assignment.
WORKSHEET_KEY = "Participant "
FIELDS = ("name", "email", "team", "section")


class ImportKeys(Value, frozen=True):
    """The ids that labctl gave to students, by format and by the key in that format."""

    version: int = 1
    keys: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)


class StudentChange(Value, frozen=True):
    """One student before and after."""

    before: Student
    after: Student

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(
            name
            for name in (*FIELDS, "active")
            if getattr(self.before, name) != getattr(self.after, name)
        )


class RosterDiff(Value, frozen=True):
    """What an import would change. `students` is the roster after it, in its order."""

    format: str
    students: tuple[Student, ...]
    added: tuple[Student, ...] = ()
    changed: tuple[StudentChange, ...] = ()
    returned: tuple[Student, ...] = ()
    left: tuple[Student, ...] = ()
    same: int = 0
    keys: ImportKeys = ImportKeys()

    @property
    def is_empty(self) -> bool:
        return not (self.added or self.changed or self.returned or self.left)


def read_table_file(path: Path) -> tuple[bytes, Table]:
    """Read a file's bytes and its table; ConfigError lists everything wrong with its format."""
    data = read_table_bytes(path)
    problems: list[Problem] = []
    table = read_table(data, problems)
    if table is None:
        raise make_table_error(str(path), problems)
    if problems:
        # Report rows that do not fit the header together with wrong values in other rows.
        name = roster_formats.detect_format(table)
        if name:
            roster_formats.read_people(table, name, problems)
        raise make_table_error(str(path), problems)
    return data, table


def compare(
    table: Table,
    where: str,
    known: Sequence[Student] = (),
    keys: ImportKeys | None = None,
    format: str = "",
    *,
    keep: bool = False,
) -> RosterDiff:
    """Return what importing this table would change; ConfigError lists every bad row.

    With `keep`, the table is a part of the course: students who are not in it stay unchanged.
    """
    name = format or roster_formats.detect_format(table)
    if not name:
        raise ConfigError(
            f"{where} is not a roster that labctl recognizes",
            why=f"its columns are {', '.join(table.header[:8])}; labctl reads exports of Canvas, "
            "Moodle, GitHub Classroom and nbgrader, and a CSV with `id`, `email` or `name`",
            hint="rename the columns to id, name, email, team, section",
        )
    problems: list[Problem] = []
    people = roster_formats.read_people(table, name, problems)
    if not people and not problems:
        problems.append(Problem("", 0, "it lists no students"))
    if len(people) > MOST_STUDENTS:
        problems.append(Problem("", 0, f"more than {MOST_STUDENTS} students"))
    if problems:
        raise make_table_error(where, problems)
    ids = assign_ids(people, known, (keys or ImportKeys()).keys.get(name, {}))
    diff = _build_diff(name, people, ids, known, keys or ImportKeys(), keep=keep)
    lines = {ids[person.key]: person.line for person in people}
    student_lines = [lines.get(student.id, 0) for student in diff.students]
    roster_checks.check_duplicates(diff.students, student_lines, problems)
    if problems:
        raise make_table_error(where, problems)
    return diff


def assign_ids(
    people: Sequence[ImportedPerson], known: Sequence[Student], keys: Mapping[str, str]
) -> dict[str, str]:
    """Return an id for each key: the known one, or a new one that nobody has."""
    by_id = {student.id: student for student in known}
    by_mail = {student.email.casefold(): student.id for student in known if student.email}
    bound = {id_ for key, id_ in keys.items() if not key.startswith(WORKSHEET_KEY)}
    ids: dict[str, str] = {}
    for person in people:
        id_by_mail = by_mail.get(person.email.casefold(), "")
        if person.key in keys:
            ids[person.key] = keys[person.key]
        elif person.exact:
            ids[person.key] = person.login
        elif id_by_mail and id_by_mail not in bound:
            ids[person.key] = id_by_mail
    used_ids = set(by_id) | set(ids.values()) | set(keys.values())
    for person in people:
        if person.key in ids:
            continue
        derived_id = roster_checks.derive_id(person.login or person.name)
        namesake = by_id.get(derived_id)
        is_same = namesake is not None and namesake.name.casefold() == person.name.casefold()
        if is_same and derived_id not in bound and derived_id not in ids.values():
            ids[person.key] = derived_id
            continue
        ids[person.key] = _free_id(derived_id, used_ids)
        used_ids.add(ids[person.key])
    return ids


def load_keys(path: Path) -> ImportKeys:
    """Read the keys in a course's private folder; empty if it has none yet."""
    file = path / KEYS_FILE
    try:
        return decode_json(file.read_bytes(), ImportKeys)
    except FileNotFoundError:
        return ImportKeys()
    except msgspec.MsgspecError:
        raise LabError(
            f"{file} is damaged",
            why="it maps the course system's students to ids",
            hint=f"mv {file} {file}.old   # students are then matched by their mail address",
        ) from None


def save_keys(path: Path, keys: ImportKeys) -> None:
    """Write the keys into a course's private folder."""
    write_private(path / KEYS_FILE, msgspec.json.encode(keys) + b"\n")


def _free_id(preferred: str, used_ids: set[str]) -> str:
    number, candidate = 2, preferred
    while candidate in used_ids:
        end = f"-{number}"
        candidate = f"{preferred[: 39 - len(end)].rstrip('-')}{end}"
        number += 1
    return candidate


def _build_diff(
    name: str,
    people: Sequence[ImportedPerson],
    ids: Mapping[str, str],
    known: Sequence[Student],
    keys: ImportKeys,
    *,
    keep: bool,
) -> RosterDiff:
    before = {student.id: student for student in known}
    after = {ids[person.key]: _merge_student(person, ids[person.key], before) for person in people}
    left_students = (
        [] if keep else [student for student in known if student.active and student.id not in after]
    )
    merged: dict[str, Student] = {}
    for old in known:
        new = after.get(old.id, old)
        has_left = old.active and old.id not in after and not keep
        merged[old.id] = msgspec.structs.replace(new, active=False) if has_left else new
    added = [student for student in after.values() if student.id not in before]
    pairs = [(before[student.id], student) for student in after.values() if student.id in before]
    format_keys = {**keys.keys.get(name, {}), **ids}
    return RosterDiff(
        format=name,
        students=(*merged.values(), *added),
        added=tuple(added),
        changed=tuple(
            StudentChange(before=old, after=new) for old, new in pairs if old != new and old.active
        ),
        returned=tuple(new for old, new in pairs if not old.active),
        left=tuple(left_students),
        same=sum(old == new for old, new in pairs),
        keys=ImportKeys(keys={**keys.keys, name: format_keys}),
    )


def _merge_student(
    person: ImportedPerson, student_id: str, before: Mapping[str, Student]
) -> Student:
    """Return the student with the values of the table; empty ones stay as they were."""
    old = before.get(student_id, Student(id=student_id))
    return Student(
        id=student_id,
        name=person.name or old.name,
        email=person.email or old.email,
        team=roster_checks.derive_id(person.team) if person.team else old.team,
        section=person.section or old.section,
    )

"""Creating a course's folder from a roster, and importing a new roster into it."""

from __future__ import annotations

import re
import time
from pathlib import Path

from labctl.config import COURSE_FILE, find_person_name, parse_name
from labctl.config.identity import write_draft, write_private
from labctl.courses.assignment_seats import freeze_closed
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.records.gitignore import ignore_in_git
from labctl.courses.records.ledger_entries import CourseLedgerDraft
from labctl.courses.records.roster import write_roster
from labctl.courses.records.roster_import import (
    RosterDiff,
    compare,
    load_keys,
    read_table_file,
    save_keys,
)
from labctl.errors import ConfigError, PolicyError, UsageError
from labctl.events import Note, Question, Reporter
from labctl.model import Value

DIRECTORIES = ("assignments", "shared", "imported")


class CourseCreation(Value, frozen=True):
    """The result of `init_course`: `made` is True for a new folder, `diff` is what the roster
    changed.
    """

    path: Path
    made: bool
    diff: RosterDiff


def init_course(
    templates: Path, target: Path, roster: Path, reporter: Reporter, *, format: str = ""
) -> CourseCreation:
    """Create a course's folder and import its roster; repeating it changes nothing.

    ConfigError lists every bad row of the roster; nothing is created then.
    """
    try:
        name = parse_name(target.absolute().name)
    except ValueError as error:
        raise UsageError(
            f"a course cannot be called {target.name!r}",
            why=str(error),
            hint="labctl course init ml-2026 --roster FILE",
        ) from None
    file = target / COURSE_FILE
    is_new = not file.exists()
    if is_new and target.is_dir() and any(target.iterdir()):
        raise PolicyError(
            f"{target} is not empty and is not a course",
            why="a course must be created in a new or empty directory",
            hint=f"labctl course init {name}-2 --roster {roster}",
        )
    _, table = read_table_file(roster)
    if is_new:
        compare(
            table, str(roster), format=format
        )  # raises for a bad roster before anything is created
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in DIRECTORIES:
        (target / directory).mkdir(mode=0o700, exist_ok=True)
    make_private(target)
    ignore_in_git(target)
    if is_new:
        text = (templates / "course" / COURSE_FILE).read_text().replace("NAME", name)
        write_draft(file, text.encode(), mode=0o644).replace(file)
    diff = import_roster(CourseFolder(target), roster, reporter, format=format)
    return CourseCreation(path=target, made=is_new, diff=diff)


def preview_import(
    folder: CourseFolder, roster: Path, *, format: str = "", keep: bool = False
) -> tuple[bytes, RosterDiff]:
    """Return the roster's bytes and what importing them would change. Nothing is changed."""
    data, table = read_table_file(roster)
    students = folder.list_students(active_only=False) if folder.roster_file.exists() else ()
    keys = load_keys(folder.private)
    return data, compare(table, str(roster), students, keys, format, keep=keep)


def import_roster(
    folder: CourseFolder,
    roster: Path,
    reporter: Reporter,
    *,
    format: str = "",
    keep: bool = False,
    by: str = "",
) -> RosterDiff:
    """Import a roster. Missing students become inactive, with consent; nobody is deleted.

    The ledger says that `by` did it, by default the user of this process.
    PolicyError without that consent; nothing is changed then.
    """
    data, diff = preview_import(folder, roster, format=format, keep=keep)
    if diff.left and not reporter.confirm(
        Question(
            question=_missing_question(len(diff.left), roster.name),
            detail="\n".join(f"- {student.id}  {student.name}" for student in diff.left),
        )
    ):
        raise PolicyError(
            "nothing was imported",
            why="students who are dropped keep their data in the course, but get no more servers",
            hint=f"labctl course roster {roster} --keep   # if the file is only a part",
        )
    _store_imported_file(folder, roster, data)
    if diff.is_empty and folder.roster_file.exists():
        save_keys(folder.private, diff.keys)
        return diff
    if folder.roster_file.exists():
        freeze_closed(
            folder, by=by or find_person_name()
        )  # while the roster still has the old teams
    write_roster(folder.roster_file, diff.students)
    save_keys(folder.private, diff.keys)
    folder.refresh()
    folder.ledger.append_all(_ledger_lines(diff, by or find_person_name()))
    for student in diff.left:
        _note_idle_seat(folder, student.id, reporter)
    return diff


def _missing_question(count: int, file: str) -> str:
    if count == 1:
        return f"1 student is missing from {file}. Mark as dropped?"
    return f"{count} students are missing from {file}. Mark them as dropped?"


def _note_idle_seat(folder: CourseFolder, student: str, reporter: Reporter) -> None:
    seat = folder.find_seat_of(student)
    active = {other.id for other in folder.list_students()}
    if not active & set(seat.students):
        text = f"{student} has left. To end their server: labctl course down --only {seat.name}"
        reporter.emit(Note(text=text))


def _ledger_lines(diff: RosterDiff, by: str) -> list[CourseLedgerDraft]:
    detail = {
        "format": diff.format,
        "added": [student.id for student in diff.added],
        "returned": [student.id for student in diff.returned],
        "changed": [change.after.id for change in diff.changed],
    }
    left_lines = [
        CourseLedgerDraft(kind="left", seat=student.seat, student=student.id, by=by)
        for student in diff.left
    ]
    return [CourseLedgerDraft(kind="roster", by=by, detail=detail), *left_lines]


def _store_imported_file(folder: CourseFolder, roster: Path, data: bytes) -> None:
    """Store the imported file unchanged, unless it is the newest one already.

    Names sort by time, the newest last.
    """
    imported = list_imported_files(folder)
    if imported and imported[-1].read_bytes() == data:
        return
    folder.imported.mkdir(mode=0o700, exist_ok=True)
    stem = re.sub(r"[^a-z0-9]+", "-", roster.stem.lower()).strip("-")[:40] or "roster"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    number = len(imported) + 1
    write_private(folder.imported / f"{number:04}-{stamp}-{stem}.csv", data)


def list_imported_files(folder: CourseFolder) -> list[Path]:
    """List the imported files, the newest last."""
    return sorted(folder.imported.glob("[0-9]*.csv")) if folder.imported.is_dir() else []


def find_newest_import(folder: CourseFolder) -> Path:
    imported = list_imported_files(folder)
    if not imported:
        raise ConfigError(
            "this course has no imported roster",
            why="grades are written into the table that the roster came from",
            hint="labctl course roster FILE\n"
            "labctl course grades ASSIGNMENT --format csv   # without a roster",
        )
    return imported[-1]

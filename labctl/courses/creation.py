"""A course's folder from a roster, and a new roster into a folder that is there."""

from __future__ import annotations

import getpass
import re
import time
from pathlib import Path

from labctl.config import COURSE_FILE, parse_name
from labctl.config.identity import write_draft, write_private
from labctl.courses.assignment_seats import freeze_closed
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.records.gitignore import ignore_in_git
from labctl.courses.records.ledger import Draft
from labctl.courses.records.roster import write_roster
from labctl.courses.records.roster_import import (
    RosterDiff,
    compare,
    load_keys,
    read_table_file,
    save_keys,
)
from labctl.errors import ConfigError, PolicyError, UsageError
from labctl.events import Decision, Note, Reporter
from labctl.model import Value

DIRECTORIES = ("assignments", "shared", "imported")


class Begun(Value, frozen=True):
    """`made` says whether the folder is new; `diff` what the roster did."""

    path: Path
    made: bool
    diff: RosterDiff


def acting() -> str:
    """Who does it, for the ledger."""
    return getpass.getuser()


def init(
    templates: Path, target: Path, roster: Path, reporter: Reporter, *, format: str = ""
) -> Begun:
    """A course's folder. Repeated with the same roster, nothing changes.

    ConfigError with every bad row of the roster: then nothing is made at all.
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
    made = not file.exists()
    if made and target.is_dir() and any(target.iterdir()):
        raise PolicyError(
            f"{target} is not empty and is no course",
            why="a course is only begun in a new directory",
            hint=f"labctl course init {name}-2 --roster {roster}",
        )
    _, table = read_table_file(roster)
    if made:
        compare(table, str(roster), format=format)  # says what is wrong before anything is made
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in DIRECTORIES:
        (target / directory).mkdir(mode=0o700, exist_ok=True)
    make_private(target)
    ignore_in_git(target)
    if made:
        text = (templates / "course" / COURSE_FILE).read_text().replace("NAME", name)
        write_draft(file, text.encode(), mode=0o644).replace(file)
    diff = import_roster(CourseFolder(target), roster, reporter, format=format)
    return Begun(path=target, made=made, diff=diff)


def look(
    folder: CourseFolder, roster: Path, *, format: str = "", keep: bool = False
) -> tuple[bytes, RosterDiff]:
    """The roster's bytes and what importing them would change. Nothing is changed."""
    data, table = read_table_file(roster)
    known = folder.students(active_only=False) if folder.roster_file.exists() else ()
    keys = load_keys(folder.private)
    return data, compare(table, str(roster), known, keys, format, keep=keep)


def import_roster(
    folder: CourseFolder,
    roster: Path,
    reporter: Reporter,
    *,
    format: str = "",
    keep: bool = False,
) -> RosterDiff:
    """Take a roster in. Who is not in it any more becomes inactive, after a yes; nobody is dropped.

    PolicyError where that yes is refused: then nothing is changed.
    """
    data, diff = look(folder, roster, format=format, keep=keep)
    if diff.left and not reporter.ask(
        Decision(
            question=f"{len(diff.left)} of {len(folder.students())} students are not in "
            f"{roster.name}. Have they left?",
            detail="\n".join(f"- {one.id}  {one.name}" for one in diff.left),
        )
    ):
        raise PolicyError(
            "nothing was imported",
            why="who left keeps what they have in the course, but gets no server any more",
            hint=f"labctl course roster {roster} --yes   # or --keep, for a part of the course",
        )
    _keep_bytes(folder, roster, data)
    if diff.nothing and folder.roster_file.exists():
        save_keys(folder.private, diff.keys)
        return diff
    if folder.roster_file.exists():
        freeze_closed(folder, by=acting())  # with the teams of before
    write_roster(folder.roster_file, diff.students)
    save_keys(folder.private, diff.keys)
    folder.refresh()
    folder.ledger.append_all(_lines(diff))
    for one in diff.left:
        _told_left(folder, one.id, reporter)
    return diff


def _told_left(folder: CourseFolder, student: str, reporter: Reporter) -> None:
    seat = folder.seat_of(student)
    active = {one.id for one in folder.students()}
    if not active & set(seat.students):
        text = f"{student} has left; labctl course down --only {seat.name} ends what they have"
        reporter.emit(Note(text=text))


def _lines(diff: RosterDiff) -> list[Draft]:
    by = acting()
    detail = {
        "format": diff.format,
        "added": [one.id for one in diff.added],
        "returned": [one.id for one in diff.returned],
        "changed": [one.after.id for one in diff.changed],
    }
    left = [Draft(kind="left", seat=one.seat, student=one.id, by=by) for one in diff.left]
    return [Draft(kind="roster", by=by, detail=detail), *left]


def _keep_bytes(folder: CourseFolder, roster: Path, data: bytes) -> None:
    """The file as it came, newest last by name; one that is the last already is not kept twice."""
    known = imported_files(folder)
    if known and known[-1].read_bytes() == data:
        return
    folder.imported.mkdir(mode=0o700, exist_ok=True)
    stem = re.sub(r"[^a-z0-9]+", "-", roster.stem.lower()).strip("-")[:40] or "roster"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    number = len(known) + 1
    write_private(folder.imported / f"{number:04}-{stamp}-{stem}.csv", data)


def imported_files(folder: CourseFolder) -> list[Path]:
    """What was imported, the newest last."""
    return sorted(folder.imported.glob("[0-9]*.csv")) if folder.imported.is_dir() else []


def newest_imported(folder: CourseFolder) -> Path:
    known = imported_files(folder)
    if not known:
        raise ConfigError(
            "nothing was imported into this course",
            why="grades are written back into the table that the roster came from",
            hint="labctl course roster FILE   # or labctl course grades ... --format csv",
        )
    return known[-1]

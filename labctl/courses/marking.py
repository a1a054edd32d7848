"""Marking: people give points for the items of a rubric, and excuse students.

Graders may work at the same time: a mark is checked and written while no other can be written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from labctl.config.document import quote
from labctl.config.reader import find_nearest
from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.code_folders import unpack_parts
from labctl.courses.collect import find_rules
from labctl.courses.grades import list_current_grades
from labctl.courses.grading.results import clean_text
from labctl.courses.lateness import DeadlineJudge, find_counting_receipt
from labctl.courses.marking_tasks import MarkingTask, make_marking_task
from labctl.courses.records.comments import NOTEBOOK
from labctl.courses.records.excuses import Excuse, draft_excuse_line, read_excuses
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.gradebook import Grade, points_text
from labctl.courses.records.marks import (
    ItemMark,
    MarkedSubmission,
    draft_mark_line,
    read_marks,
)
from labctl.courses.records.student import Student
from labctl.courses.submission_files import READABLE, find_submission
from labctl.errors import ConfigError, NotFoundError, PolicyError, UsageError
from labctl.model import Value
from labctl.state.locks import hold_lock
from labctl.submissions.receiver import Receiver

MOST_NOTE_CHARS = 2000


class GivenMark(Value, frozen=True):
    """A mark for these students; `points` None if it was taken back. `before` was replaced.

    `submission` is what the mark is for, with number 0 if nothing was submitted.
    """

    assignment: str
    item: str
    students: tuple[str, ...]
    points: float | None
    most: float
    before: ItemMark | None = None
    submission: MarkedSubmission | None = None


def give_mark(
    folder: CourseFolder,
    assignment: str,
    name: str,
    item: str,
    text: str,
    *,
    note: str = "",
    by: str = "",
    alone: bool = False,
    only: Sequence[str] = (),
    replace: bool = False,
    seen: Sequence[ItemMark] = (),
    submission: MarkedSubmission | None = None,
) -> GivenMark:
    """Give the students of a seat `text` points for an item; with `alone`, only that student.

    `only` limits it to these students of the seat. The mark is for `submission`, by default the one
    that counts now.

    PolicyError if another grader has marked the item, unless `replace` or `seen` has that mark;
    UsageError for points that the item does not have.
    """
    most = find_item(folder, assignment, item)
    points = parse_points(text, assignment, name, item, most)
    seat, students = choose_students(folder, assignment, name, alone=alone, by=by)
    students = tuple(one for one in students if one in only) if only else students
    note = clean_note(note)
    submission = submission or find_submission(folder, assignment, seat)
    ledger = folder.ledger
    before: list[ItemMark] = []

    def check() -> None:
        marks = read_marks(ledger.list_entries(kind="mark"), assignment)
        own = [mark for one in students if (mark := marks.get(one, {}).get(item))]
        others = [one for one in own if one.by != by and one not in seen]
        if others and not replace:
            raise PolicyError(
                f"{name} has {points_text(others[0].points)} points for {item} already",
                why=f"{others[0].by or 'another grader'} gave them",
                hint=f"labctl course mark {assignment} {name} {item} {text} --replace",
            )
        before[:] = own

    ledger.append_all(
        [
            draft_mark_line(
                assignment, seat.name, one, item, points, submission=submission, by=by, note=note
            )
            for one in students
        ],
        check=check,
    )
    return GivenMark(
        assignment=assignment,
        item=item,
        students=students,
        points=points,
        most=most,
        before=before[0] if before else None,
        submission=submission,
    )


def take_back_mark(
    folder: CourseFolder,
    assignment: str,
    name: str,
    item: str,
    *,
    by: str = "",
    alone: bool = False,
) -> GivenMark:
    """Take back a mark: the item is unmarked again. NotFoundError if it has no mark."""
    most = find_item(folder, assignment, item)
    seat, students = choose_students(folder, assignment, name, alone=alone, by=by)
    marks = read_marks(folder.ledger.list_entries(kind="mark"), assignment)
    own = {one: mark for one in students if (mark := marks.get(one, {}).get(item))}
    if not own:
        raise NotFoundError(
            f"{name} has no mark for {item}", hint=f"labctl course mark {assignment} --list"
        )
    folder.ledger.append_all(
        [draft_mark_line(assignment, seat.name, one, item, None, by=by) for one in own]
    )
    return GivenMark(
        assignment=assignment,
        item=item,
        students=tuple(own),
        points=None,
        most=most,
        before=next(iter(own.values())),
    )


def list_marking_tasks(folder: CourseFolder, assignment: str) -> list[MarkingTask]:
    """Return the seats with items to mark, for the first time or again, in the roster's order.

    Excused students, and seats that submitted nothing and have no mark, need none.
    """
    require_rubric(folder, assignment)
    tasks = (make_marking_task(seat, own) for seat, own in list_seat_grades(folder, assignment))
    return [task for task in tasks if task is not None]


def find_marking_task(folder: CourseFolder, assignment: str, seat: str) -> MarkingTask | None:
    """Return what is to be marked of a seat now; None if nothing is."""
    tasks = list_marking_tasks(folder, assignment)
    return next((task for task in tasks if task.seat == seat), None)


@contextmanager
def reserve_seat(folder: CourseFolder, assignment: str, seat: str) -> Iterator[None]:
    """Keep a seat's submission for one grader; LockHeldError if another has it now."""
    directory = folder.private / "marking" / assignment
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with hold_lock(directory / f".{seat}.lock", "mark", wait_s=0):
        yield


def has_unmarked(folder: CourseFolder, assignment: str) -> bool:
    """Whether the assignment has a rubric, and a submission needs marks."""
    has_rubric = bool(find_rules(folder, assignment).rubric)
    return has_rubric and bool(list_marking_tasks(folder, assignment))


def list_seat_grades(folder: CourseFolder, assignment: str) -> list[tuple[Seat, list[Grade]]]:
    """Return the seats with something to mark, and the grades of their students.

    Left out are excused students, and seats that submitted nothing and have no mark.
    """
    seats = list_assignment_seats(folder, assignment)
    students = [Student(id=one) for seat in seats for one in seat.students]
    grades = {grade.student: grade for grade in list_current_grades(folder, assignment, students)}
    listed = []
    for seat in seats:
        own = [grades[one] for one in seat.students if not grades[one].excused]
        if any(
            grade.stamp.number or grade.owner or any(item.mark for item in grade.items)
            for grade in own
        ):
            listed.append((seat, own))
    return listed


def write_readable_files(folder: CourseFolder, assignment: str, seat: Seat) -> dict[str, Path]:
    """Unpack what people read of a seat's submission; return part -> its path.

    The files are below `.course/marking`, none of them executable. {} if nothing was submitted.
    """
    receiver = Receiver(folder.drop)
    receipt = find_counting_receipt(receiver, DeadlineJudge(folder, assignment), assignment, seat)
    if receipt is None:
        return {}
    into = folder.private / "marking" / assignment
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    bundle = receiver.find_bundle(assignment, receipt.student, receipt.number)
    home = unpack_parts(bundle, into, f"{seat.name}-{receipt.student}-{receipt.number}", READABLE)
    paths = {name.rstrip("/").split(".")[0]: home / name for name in READABLE}
    notebooks = sorted((home / "code").rglob(f"*{NOTEBOOK}"))
    if notebooks:
        paths["notebook"] = notebooks[0]
    return {part: path for part, path in paths.items() if path.exists()}


def set_excuse(
    folder: CourseFolder,
    assignment: str,
    name: str,
    *,
    excused: bool,
    by: str = "",
    why: str = "",
) -> tuple[str, ...]:
    """Excuse a student, or all students of a team, or take it back; return who changed.

    An excuse keeps its reason unless `why` is another one.
    """
    find_rules(folder, assignment)
    (seat,) = folder.choose_seats([name], list_assignment_seats(folder, assignment, by=by))
    students = seat.students if name == seat.name else (name,)
    excuses = read_excuses(folder.ledger.list_entries(kind="excuse"), assignment)
    why = clean_note(why)

    def is_same(student: str) -> bool:
        known = excuses.get((assignment, student))
        return (known is not None and why in ("", known.why)) if excused else known is None

    changed = tuple(one for one in students if not is_same(one))
    folder.ledger.append_all(
        [
            draft_excuse_line(assignment, seat.name, one, excused=excused, by=by, why=why)
            for one in changed
        ]
    )
    return changed


def list_excuses(folder: CourseFolder, assignment: str = "") -> list[Excuse]:
    """List the excuses in force, of one assignment or of all, by assignment and student."""
    if assignment:
        find_rules(folder, assignment)
    excuses = read_excuses(folder.ledger.list_entries(kind="excuse"), assignment)
    return [excuse for _, excuse in sorted(excuses.items())]


def require_rubric(folder: CourseFolder, assignment: str) -> Mapping[str, float]:
    rubric = find_rules(folder, assignment).rubric
    if not rubric:
        raise ConfigError(
            f"{assignment} has no rubric",
            why="only the items of a rubric are marked by hand",
            hint=f"edit {folder.config.path}: rubric: {{code: 20, presentation: 20}}",
        )
    return rubric


def find_item(folder: CourseFolder, assignment: str, item: str) -> float:
    """Return what an item is worth; NotFoundError suggests the nearest name."""
    rubric = require_rubric(folder, assignment)
    if item not in rubric:
        near = find_nearest(item, rubric)
        raise NotFoundError(
            f"the rubric of {assignment} has no item {quote(item)}",
            why=f"did you mean {near}?" if near else f"it has {', '.join(rubric)}",
            hint=f"labctl course mark {assignment} --list",
        )
    return rubric[item]


def parse_points(
    text: str, assignment: str, name: str, item: str, most: float, *, command: str = ""
) -> float:
    """Return the points for an item that is worth `most`; UsageError for anything else.

    `command` is what the error suggests, with the points after it; by default `labctl course mark`.
    """
    command = command or f"labctl course mark {assignment} {name} {item}"
    hint = f"{command} {points_text(most)}"
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", text):
        raise UsageError(f"{quote(text)} is not a number of points", hint=hint)
    if float(text) > most:
        raise UsageError(
            f"{item} is worth {points_text(most)} points, and {text} is more",
            hint=hint,
        )
    return float(text)


def choose_students(
    folder: CourseFolder, assignment: str, name: str, *, alone: bool = False, by: str = ""
) -> tuple[Seat, tuple[str, ...]]:
    """Return the seat, and who gets the mark: all of its students, or `name` alone."""
    (seat,) = folder.choose_seats([name], list_assignment_seats(folder, assignment, by=by))
    if alone and name not in seat.students:
        raise UsageError(
            f"--alone marks one student, and {name} is a team",
            hint=f"labctl course mark {assignment} {seat.students[0]} ITEM POINTS --alone",
        )
    return seat, (name,) if alone else seat.students


def clean_note(note: str) -> str:
    """Return a note without control characters: it is shown in terminals and pages."""
    return clean_text(note.strip(), MOST_NOTE_CHARS)

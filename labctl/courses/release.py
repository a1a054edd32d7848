"""Feedback for students: nothing of a grade reaches them before it was released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from labctl.config.identity import write_private
from labctl.courses.assignment_seats import assignment_seats, choose_seats
from labctl.courses.collect import rules_of
from labctl.courses.grade_store import Shelf, owners
from labctl.courses.grades import current_grades, keep_released
from labctl.courses.grading.feedback import page
from labctl.courses.grading.record import FEEDBACK, RESULTS, Record, results_of
from labctl.courses.grading.results import lateness_note, parse_results
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.gradebook import Grade
from labctl.courses.records.ledger import Draft, Entry
from labctl.courses.records.released_grades import (
    as_released,
    change_text,
    released_line,
    released_lines,
)
from labctl.courses.records.student import Student
from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.events import Decision, Reporter, Silent
from labctl.model import Value
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver


class Released(Value, frozen=True):
    """`students` may read their feedback now; `waiting` seats have no grade that could be.

    `changes` says which grades were released before with another score.
    """

    assignment: str
    students: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def release(
    folder: CourseFolder,
    name: str,
    seats: Sequence[Seat] = (),
    *,
    by: str = "",
    reporter: Reporter | None = None,
) -> Released:
    """Write `feedback.html` beside each grade, let its student fetch it, and say so in the ledger.

    Seats whose grading did not work are left out. Repeated, it brings feedback up to date. Where
    a score changes that was released before, `reporter` is asked first: PolicyError, and nothing
    is released, without a yes. NotFoundError where nothing is graded yet.
    """
    rules_of(folder, name)
    keep_released(folder, name, by)
    shelf = Shelf(folder, name, by)
    chosen = choose_seats(assignment_seats(folder, name, by=by), seats)
    made = {seat.name: shelf.read(seat.name) for seat in chosen}
    graded = [(seat, one) for seat in chosen if (one := made[seat.name]) is not None and one.raw]
    students = [Student(id=one) for seat, _ in graded for one in seat.students]
    if not students:
        raise NotFoundError(f"nothing of {name} is graded yet", hint=f"labctl course grade {name}")
    lines = released_lines(folder.ledger.entries(kind="released"), name)
    found = current_grades(folder, name, students)
    before = {one.student: as_released(one, lines.get(one.student)) for one in found}
    changes = [change_text(one) for one in before.values() if one.unreleased is not None]
    _agree(name, changes, reporter or Silent())
    now = {one.student: one for one in found}
    for _, record in graded:
        _give(shelf, record, now)
    drafts = [released_line(name, one, by, before[one.student].change) for one in found]
    folder.ledger.append_all([one for one in drafts if _is_news(one, lines.get(one.student))])
    return Released(
        assignment=name,
        students=tuple(dict.fromkeys(one.id for one in students)),
        waiting=tuple(seat.name for seat in chosen if (seat, made[seat.name]) not in graded),
        changes=tuple(changes),
    )


def _agree(name: str, changes: Sequence[str], reporter: Reporter) -> None:
    if not changes:
        return
    what = "1 grade" if len(changes) == 1 else f"{len(changes)} grades"
    question = f"change {what} of {name} that {'was' if len(changes) == 1 else 'were'} released?"
    if not reporter.ask(Decision(question=question, detail="\n".join(changes))):
        raise PolicyError(
            "nothing was released",
            why=f"{what} that students have seen would change",
            hint=f"labctl course grades {name} --release --yes",
        )


def _is_news(draft: Draft, line: Entry | None) -> bool:
    return line is None or line.detail != draft.detail


def _give(shelf: Shelf, made: Record, now: Mapping[str, Grade]) -> None:
    """Let everybody of a seat read their own feedback, with what was corrected for them."""
    receiver = Receiver(shelf.folder.drop)
    for owner in owners(made):
        found = _feedback(shelf, _corrected(shelf, owner, made, now.get(owner)))
        write_private(shelf.place(owner) / FEEDBACK, found.page.encode())
        receiver.give(shelf.name, owner, found)


def _corrected(shelf: Shelf, owner: str, made: Record, grade: Grade | None) -> Record:
    """The record with what a person wrote into the owner's results.json."""
    if grade is None or not grade.corrected or made.raw is None:
        return made
    file = shelf.place(owner) / RESULTS
    try:
        found = parse_results(file.read_text(errors="replace"), made.points)
    except ValueError as error:
        raise LabError(
            f"the correction for {owner} cannot be released",
            why=f"{file}: {error}",
            hint=f"edit it, or drop it: rm {file}; labctl course grade {shelf.name}",
        ) from None
    stale = lateness_note(made.raw.score, made.points, made.penalty, made.late_s)
    return msgspec.structs.replace(
        made,
        raw=msgspec.structs.replace(found, output=found.output.removesuffix(stale).rstrip()),
        score=grade.final,
        late_s=grade.stamp.late_s,
        penalty=grade.stamp.penalty,
    )


def _feedback(shelf: Shelf, made: Record) -> Feedback:
    results = results_of(made)
    return Feedback(
        assignment=made.assignment,
        number=made.number,
        score=made.score or 0.0,
        points=made.points,
        text=results.output,
        page=page(made, results, shelf.output(made.seat)),
    )

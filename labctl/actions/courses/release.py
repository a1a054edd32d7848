"""Feedback for students: nothing of a grade reaches them before it was released."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.actions.courses.collect import rules_of
from labctl.actions.courses.shelf import Shelf, owners
from labctl.config.identity import write_private
from labctl.courses.folder import CourseFolder, Seat
from labctl.courses.ledger import Draft
from labctl.errors import NotFoundError
from labctl.grading.feedback import page
from labctl.grading.record import FEEDBACK, Record, results_of
from labctl.model import Value
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver


class Released(Value, frozen=True):
    """`students` may read their feedback now; `waiting` seats have no grade that could be."""

    assignment: str
    students: tuple[str, ...]
    waiting: tuple[str, ...] = ()


def release(
    folder: CourseFolder, name: str, seats: Sequence[Seat] = (), *, by: str = ""
) -> Released:
    """Write `feedback.html` beside each grade, let its student fetch it, and say so in the ledger.

    Seats whose grading did not work are left out. Repeated, it brings feedback up to date.
    NotFoundError where nothing is graded yet.
    """
    rules_of(folder, name)
    shelf, receiver = Shelf(folder, name, by), Receiver(folder.drop)
    chosen = tuple(seats) or folder.seats(active_only=False)
    known = {
        one.student
        for one in folder.ledger.entries(kind="released")
        if one.detail.get("assignment") == name
    }
    students: list[str] = []
    waiting = []
    for seat in chosen:
        made = shelf.read(seat.name)
        if made is None or made.raw is None:
            waiting.append(seat.name)
            continue
        found = _feedback(shelf, made)
        for owner in owners(made):
            write_private(shelf.place(owner) / FEEDBACK, found.page.encode())
            receiver.give(name, owner, found)
        students += [one for one in seat.students if one not in students]
    if not students:
        raise NotFoundError(f"nothing of {name} is graded yet", hint=f"labctl course grade {name}")
    fresh = [one for one in students if one not in known]
    folder.ledger.append_all(
        [Draft(kind="released", student=one, by=by, detail={"assignment": name}) for one in fresh]
    )
    return Released(assignment=name, students=tuple(students), waiting=tuple(waiting))


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

"""What was handed in for an assignment: fetched, held against its receipts, one for each seat.

Which submission counts: the last one of the seat that its rules accept, extensions included.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from labctl.config.course_schema import AssignmentConfig
from labctl.config.document import shown
from labctl.config.reader import nearest
from labctl.courses.assignment_seats import assignment_seats, choose_seats
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.ledger import Draft
from labctl.errors import NotFoundError
from labctl.model import Value
from labctl.submissions.receipt import Receipt
from labctl.submissions.receiver import Receiver

State = Literal["in", "missing", "damaged", "closed"]


class Handed(Value, frozen=True):
    """A seat's submission that counts. Without one `state` says why: nobody handed in, what there
    is was changed after it was signed for, or none is within the rules any more.

    `bundle` is its file. `late_s` and `penalty` are by the rules and extensions of now.
    """

    seat: str
    students: tuple[str, ...]
    state: State
    student: str = ""
    number: int = 0
    received: str = ""
    late_s: int = 0
    penalty: int = 0
    run: str = ""
    size: int = 0
    sha256: str = ""
    bundle: str = ""
    submissions: int = 0
    why: str = ""


class Collection(Value, frozen=True):
    """An assignment. `fetched` and `refused` are posts of a bucket that were new.

    `strangers` handed in and are in no seat: they stay where they are.
    """

    assignment: str
    handed: tuple[Handed, ...]
    damaged: tuple[str, ...] = ()
    fetched: int = 0
    refused: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()

    @property
    def here(self) -> tuple[Handed, ...]:
        return tuple(one for one in self.handed if one.state == "in")


def collect(
    folder: CourseFolder, name: str, seats: Iterable[Seat] = (), *, profile: str = "", by: str = ""
) -> Collection:
    """Everything handed in for an assignment, of these seats (of all, of those who left too).

    Teams are those of the moment when it closed.

    Posts in a bucket are taken in first. Every bundle is hashed and held against its receipt, and
    that against the receiver's key. What is new is written into the ledger. Safe to repeat.
    """
    rules_of(folder, name)
    receiver = Receiver(folder.drop)
    if not receiver.assignment_file(name).is_file():
        raise NotFoundError(
            f"nothing can have been handed in for {name}",
            why="its receiver has no such assignment yet",
            hint="labctl course serve   # opens what course.yaml names",
        )
    fetched, refused = _fetched(receiver, name, profile)
    here = assignment_seats(folder, name, by=by)
    chosen = choose_seats(here, seats)
    every = list(receiver.check(name))
    wrong = {_place(found): why for found, why in every if why}
    receipts = [found for found, why in every if not why and isinstance(found, Receipt)]
    handed = tuple(_of_seat(receiver, name, seat, receipts, wrong) for seat in chosen)
    members = {one for seat in here for one in (seat.name, *seat.students)}
    known = {_place(found).split("/")[0] for found, _ in every}
    _note(folder, name, handed, by)
    return Collection(
        assignment=name,
        handed=handed,
        damaged=tuple(f"{place}: {why}" for place, why in sorted(wrong.items())),
        fetched=fetched,
        refused=refused,
        strangers=tuple(sorted(known - members)),
    )


def rules_of(folder: CourseFolder, name: str) -> AssignmentConfig:
    """What course.yaml says of an assignment; NotFoundError names the nearest."""
    found = folder.config.assignments.get(name)
    if found is None:
        near = nearest(name, list(folder.config.assignments))
        known = ", ".join(folder.config.assignments) or "none yet"
        raise NotFoundError(
            f"there is no assignment {shown(name)}",
            why=f"did you mean {near}?" if near else f"course.yaml has {known}",
            hint=f"edit {folder.config.path}",
        )
    return found


def told(found: Collection) -> str:
    """A collection in a line, for whoever asked for all of a course."""
    text = f"{len(found.here)} of {len(found.handed)} handed in, every bundle as it was signed for"
    return text if not found.damaged else f"{text} but {len(found.damaged)}"


def _fetched(receiver: Receiver, name: str, profile: str) -> tuple[int, tuple[str, ...]]:
    if not receiver.rules(name).hand_in.startswith("s3://"):
        return 0, ()
    from labctl.submissions.receive import collect_posts

    posts = collect_posts(receiver, name, profile)
    refused = tuple(f"{one.student}: {one.why}" for one in posts if one.signed is None)
    return len(posts) - len(refused), refused


def _place(found: Receipt | str) -> str:
    """STUDENT/NUMBER, whichever of the two is known."""
    if isinstance(found, Receipt):
        return f"{found.student}/{found.number:04}"
    return "/".join(Path(found).parts[-2:])


def _of_seat(
    receiver: Receiver, name: str, seat: Seat, receipts: list[Receipt], wrong: dict[str, str]
) -> Handed:
    members = {seat.name, *seat.students}
    own = sorted(
        (one for one in receipts if one.student in members),
        key=lambda one: (received_at(one), one.number),
    )
    spoilt = [place for place in sorted(wrong) if place.split("/")[0] in members]
    nothing = Handed(seat=seat.name, students=seat.students, state="missing")
    for one in reversed(own):
        standing = receiver.standing(name, one.student, received_at(one))
        if standing.accepted:
            return Handed(
                seat=seat.name,
                students=seat.students,
                state="in",
                student=one.student,
                number=one.number,
                received=one.received,
                late_s=standing.late_s,
                penalty=standing.penalty,
                run=one.run,
                size=one.bundle_bytes,
                sha256=one.bundle_sha256,
                bundle=str(receiver.bundle_of(name, one.student, one.number)),
                submissions=len(own) + len(spoilt),
                why=_spoilt(spoilt, wrong),
            )
    if spoilt:
        return _as(nothing, "damaged", _spoilt(spoilt, wrong), len(spoilt))
    if own:
        why = "all of it came after the assignment's end"
        return _as(nothing, "closed", why, len(own))
    return nothing


def _as(nothing: Handed, state: State, why: str, submissions: int) -> Handed:
    return Handed(
        seat=nothing.seat,
        students=nothing.students,
        state=state,
        why=why,
        submissions=submissions,
    )


def _spoilt(places: list[str], wrong: dict[str, str]) -> str:
    return "; ".join(f"{place}: {wrong[place]}" for place in places)


def received_at(receipt: Receipt) -> float:
    """Unix time of a receipt."""
    return float(calendar.timegm(time.strptime(receipt.received, "%Y-%m-%dT%H:%M:%SZ")))


def _note(folder: CourseFolder, name: str, handed: Iterable[Handed], by: str) -> None:
    """One line for each submission that was not collected before."""
    known = {
        (one.seat, str(one.detail.get("sha256", "")))
        for one in folder.ledger.entries(kind="collected")
        if one.detail.get("assignment") == name
    }
    folder.ledger.append_all(
        [
            Draft(
                kind="collected",
                seat=one.seat,
                student=one.student,
                by=by,
                detail={"assignment": name, "number": one.number, "sha256": one.sha256},
            )
            for one in handed
            if one.state == "in" and (one.seat, one.sha256) not in known
        ]
    )

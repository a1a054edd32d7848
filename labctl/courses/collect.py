"""The submissions of an assignment: fetched, checked against their receipts, one for each seat.

The last submission of a seat that the rules accept counts, extensions included.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import tzinfo
from pathlib import Path
from typing import Literal

import msgspec

from labctl.config.course_schema import AssignmentConfig
from labctl.config.document import quote
from labctl.config.reader import find_nearest
from labctl.courses.assignment_seats import choose_seats, list_assignment_seats
from labctl.courses.lateness import compute_free_days, reduce_penalty
from labctl.courses.records.excuses import KIND as EXCUSE_KIND
from labctl.courses.records.excuses import read_excuses
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.free_days import FreeDays
from labctl.courses.records.ledger_entries import CourseLedgerDraft
from labctl.courses.records.timetable import find_zone, list_pauses, short_time_text
from labctl.errors import NotFoundError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.submissions.assignment import count_late_days
from labctl.submissions.receipt import Receipt
from labctl.submissions.receiver import Receiver

with lazy_imports(__name__):
    from labctl.submissions import receive

State = Literal["in", "open", "missing", "damaged", "closed", "excused"]


class SeatSubmission(Value, frozen=True):
    """The submission of a seat that counts, or in `state` why none does.

    `missing`: nothing was submitted; `open`: nor has its due time, if any, passed. `damaged`: the
    bundle no longer matches its receipt. `closed`: everything came too late. `excused`: nothing
    counts, and all students are excused. `bundle` is the path of the file. `late_s` and `penalty`
    (percent) follow the rules and extensions of now; `in_grace_s` are the seconds after the due
    time of a submission within the grace period. The penalty is that of the days that no free day
    covers.
    """

    seat: str
    students: tuple[str, ...]
    state: State
    student: str = ""
    number: int = 0
    received: str = ""
    late_s: int = 0
    penalty: int = 0
    in_grace_s: int = 0
    free_days: FreeDays = FreeDays()
    run: str = ""
    size: int = 0
    sha256: str = ""
    bundle: str = ""
    submissions: int = 0
    why: str = ""


class Collection(Value, frozen=True):
    """The submissions of an assignment.

    `fetched` counts new posts from a bucket that were accepted, `refused` says why others were not.
    `strangers` submitted without being in a seat: their bundles stay at the receiver.
    """

    assignment: str
    submissions: tuple[SeatSubmission, ...] = msgspec.field(name="handed")
    damaged: tuple[str, ...] = ()
    fetched: int = 0
    refused: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()

    @property
    def accepted(self) -> tuple[SeatSubmission, ...]:
        return tuple(submission for submission in self.submissions if submission.state == "in")


def collect(
    folder: CourseFolder, name: str, seats: Iterable[Seat] = (), *, profile: str = "", by: str = ""
) -> Collection:
    """Collect the submissions of an assignment for these seats, by default all, past ones included.

    Teams are those of the moment when the assignment closed. Posts in a bucket are fetched first.
    Every bundle is hashed and checked against its receipt, and each receipt against the receiver's
    key. New submissions are written to the ledger. Safe to repeat.
    """
    rules = find_rules(folder, name)
    receiver = Receiver(folder.drop)
    if not receiver.assignment_file(name).is_file():
        raise NotFoundError(
            f"nobody could submit {name} yet",
            why="it has not been published to the receiver",
            hint="labctl course serve   # publishes the assignments of course.yaml",
        )
    # A receiver that an earlier version published to has no grace period yet.
    receiver.set_grace(name, rules.grace if rules.due else 0)
    receiver.set_pauses(list_pauses(folder.config))
    fetched, refused = _fetch_posts(receiver, name, profile)
    all_seats = list_assignment_seats(folder, name, by=by)
    chosen = choose_seats(all_seats, seats)
    results = list(receiver.check(name))
    damage = {_submission_id(subject): why for subject, why in results if why}
    receipts = [subject for subject, why in results if not why and isinstance(subject, Receipt)]
    zone = find_zone(folder.config)
    handed = _apply_free_days(
        folder,
        name,
        _apply_excuses(
            folder,
            name,
            [_choose_submission(receiver, name, seat, receipts, damage, zone) for seat in chosen],
        ),
    )
    members = {member for seat in all_seats for member in (seat.name, *seat.students)}
    submitters = {_submission_id(subject).split("/")[0] for subject, _ in results}
    _record_collected(folder, name, handed, by)
    return Collection(
        assignment=name,
        submissions=handed,
        damaged=tuple(f"{place}: {why}" for place, why in sorted(damage.items())),
        fetched=fetched,
        refused=refused,
        strangers=tuple(sorted(submitters - members)),
    )


def find_rules(folder: CourseFolder, name: str) -> AssignmentConfig:
    """Return an assignment's rules from course.yaml; NotFoundError suggests the nearest name."""
    rules = folder.config.assignments.get(name)
    if rules is None:
        near = find_nearest(name, list(folder.config.assignments))
        names = ", ".join(folder.config.assignments) or "none yet"
        raise NotFoundError(
            f"there is no assignment {quote(name)}",
            why=f"did you mean {near}?" if near else f"course.yaml has {names}",
            hint=f"edit {folder.config.path}",
        )
    return rules


def _fetch_posts(receiver: Receiver, name: str, profile: str) -> tuple[int, tuple[str, ...]]:
    if not receiver.load_rules(name).hand_in.startswith("s3://"):
        return 0, ()
    posts = receive.collect_posts(receiver, name, profile)
    refused = tuple(f"{post.student}: {post.why}" for post in posts if post.signed is None)
    return len(posts) - len(refused), refused


def _submission_id(subject: Receipt | str) -> str:
    """Return STUDENT/NUMBER of a receipt, or of the path of a bundle without a valid one."""
    if isinstance(subject, Receipt):
        return f"{subject.student}/{subject.number:04}"
    return "/".join(Path(subject).parts[-2:])


def _choose_submission(
    receiver: Receiver,
    name: str,
    seat: Seat,
    receipts: list[Receipt],
    damage: dict[str, str],
    zone: tzinfo,
) -> SeatSubmission:
    members = {seat.name, *seat.students}
    own_receipts = sorted(
        (receipt for receipt in receipts if receipt.student in members),
        key=lambda receipt: (receipt.received_at, receipt.number),
    )
    damaged = [place for place in sorted(damage) if place.split("/")[0] in members]
    missing = SeatSubmission(seat=seat.name, students=seat.students, state="missing")
    for receipt in reversed(own_receipts):
        standing = receiver.standing(name, receipt.student, receipt.received_at)
        if standing.accepted:
            return SeatSubmission(
                seat=seat.name,
                students=seat.students,
                state="in",
                student=receipt.student,
                number=receipt.number,
                received=receipt.received,
                late_s=standing.late_s,
                penalty=standing.penalty,
                in_grace_s=standing.in_grace_s,
                run=receipt.run,
                size=receipt.bundle_bytes,
                sha256=receipt.bundle_sha256,
                bundle=str(receiver.find_bundle(name, receipt.student, receipt.number)),
                submissions=len(own_receipts) + len(damaged),
                why=_damage_text(damaged, damage),
            )
    if damaged:
        return _without_submission(missing, "damaged", _damage_text(damaged, damage), len(damaged))
    if own_receipts:
        why = "everything was submitted after the assignment closed"
        return _without_submission(missing, "closed", why, len(own_receipts))
    if why := _describe_due_time(receiver, name, seat, zone):
        return _without_submission(missing, "open", why, 0)
    return missing


def _describe_due_time(receiver: Receiver, name: str, seat: Seat, zone: tzinfo) -> str:
    """Return the seat's due time, extensions included, as text; "" once it has passed."""
    due_times = [receiver.standing(name, student).due_at for student in seat.students]
    if None in due_times:
        return "no due time"
    due_at = max((due_at for due_at in due_times if due_at is not None), default=0)
    is_open = receiver.now() <= due_at
    return f"due {short_time_text(due_at, zone, receiver.now())}" if is_open else ""


def _apply_excuses(
    folder: CourseFolder, name: str, submissions: Iterable[SeatSubmission]
) -> list[SeatSubmission]:
    """Return the submissions with the excuses of seats whose students are all excused."""
    excuses = read_excuses(folder.ledger.list_entries(kind=EXCUSE_KIND), name)

    def apply(one: SeatSubmission) -> SeatSubmission:
        own = [excuse for student in one.students if (excuse := excuses.get((name, student)))]
        if not own or len(own) < len(one.students):
            return one
        if one.state in ("open", "missing", "closed"):
            why = "; ".join(dict.fromkeys(filter(None, (excuse.why for excuse in own))))
            return msgspec.structs.replace(one, state="excused", why=why)
        texts = dict.fromkeys(excuse.text for excuse in own)
        return msgspec.structs.replace(one, why="; ".join(filter(None, [one.why, *texts])))

    return [apply(one) for one in submissions]


def _apply_free_days(
    folder: CourseFolder, name: str, submissions: Iterable[SeatSubmission]
) -> tuple[SeatSubmission, ...]:
    """Return the submissions with the free days that they spend, and the penalty that is left."""
    submissions, rules = tuple(submissions), folder.config.assignments[name]
    days = {one.seat: count_late_days(one.late_s, rules.grace) for one in submissions}
    free_days = compute_free_days(folder, name, days)
    return tuple(
        msgspec.structs.replace(
            one, free_days=spent, penalty=reduce_penalty(rules, one.late_s, spent)
        )
        if (spent := free_days.get(one.seat)) and spent.used
        else one
        for one in submissions
    )


def _without_submission(
    missing: SeatSubmission, state: State, why: str, submissions: int
) -> SeatSubmission:
    return SeatSubmission(
        seat=missing.seat,
        students=missing.students,
        state=state,
        why=why,
        submissions=submissions,
    )


def _damage_text(places: list[str], damage: dict[str, str]) -> str:
    return "; ".join(f"{place}: {damage[place]}" for place in places)


def _record_collected(
    folder: CourseFolder, name: str, handed: Iterable[SeatSubmission], by: str
) -> None:
    """Write a ledger line for each submission that was not collected before."""
    recorded = {
        (entry.seat, str(entry.detail.get("sha256", "")))
        for entry in folder.ledger.list_entries(kind="collected")
        if entry.detail.get("assignment") == name
    }
    folder.ledger.append_all(
        [
            CourseLedgerDraft(
                kind="collected",
                seat=submission.seat,
                student=submission.student,
                by=by,
                detail={
                    "assignment": name,
                    "number": submission.number,
                    "sha256": submission.sha256,
                },
            )
            for submission in handed
            if submission.state == "in" and (submission.seat, submission.sha256) not in recorded
        ]
    )

"""Releasing feedback: students see nothing of a grade before it is released."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from labctl.config.identity import write_private
from labctl.config.times import local_time_text
from labctl.courses.assignment_seats import choose_seats, list_assignment_seats
from labctl.courses.collect import find_rules
from labctl.courses.grade_store import GradeStore, list_owners
from labctl.courses.grades import list_current_grades, record_released_scores
from labctl.courses.grading.feedback import render_page, render_text
from labctl.courses.grading.record import FEEDBACK, RESULTS, GradeRecord, build_results
from labctl.courses.grading.results import parse_results, select_shown, without_lateness_note
from labctl.courses.grading.totals import add_items, build_total_record, describe_marks
from labctl.courses.lateness import DeadlineJudge
from labctl.courses.records.comments import LineComment, describe_comments, read_comments
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.gradebook import Grade
from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.courses.records.released_grades import (
    as_released,
    change_text,
    draft_released_line,
    list_released_lines,
)
from labctl.courses.records.student import Student
from labctl.courses.records.timetable import find_zone
from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.events import Question, Reporter, SilentReporter
from labctl.model import Value
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver

# Students without marks that an error names.
MOST_NAMED = 5


class ReleaseResult(Value, frozen=True):
    """The result of a release: `students` can read their feedback now.

    `waiting` seats and students have no grade to release. `unmarked` says which of them lack marks,
    or have marks for an older submission.
    `changes` lists grades that were released before with another score.
    """

    assignment: str
    students: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    unmarked: tuple[str, ...] = ()


class _SeatRelease(Value, frozen=True):
    """A seat's grades: `ready` can be released, `waiting` cannot yet. Excused ones are neither."""

    seat: Seat
    record: GradeRecord | None
    ready: tuple[Grade, ...]
    waiting: tuple[Grade, ...]

    @property
    def waiting_names(self) -> tuple[str, ...]:
        """The seat, or those of its students who wait while others do not."""
        if not self.ready:
            return (self.seat.name,) if self.waiting or not self.seat.students else ()
        return tuple(grade.student for grade in self.waiting)


def release_grades(
    folder: CourseFolder,
    name: str,
    seats: Sequence[Seat] = (),
    *,
    by: str = "",
    reporter: Reporter | None = None,
) -> ReleaseResult:
    """Write `feedback.html` for each grade, make it available to students, and update the ledger.

    Grades that failed, lack marks or have marks for an older submission are left out, and named.
    Repeating it updates the feedback. If
    a released score would change, `reporter` asks for consent first: PolicyError without it, and
    nothing is released. NotFoundError if there is nothing to release yet.
    """
    find_rules(folder, name)
    record_released_scores(folder, name, by)
    grade_store = GradeStore(folder, name, by)
    chosen = choose_seats(list_assignment_seats(folder, name, by=by), seats)
    releases = _list_releases(grade_store, chosen)
    grades = [grade for release in releases for grade in release.ready]
    unmarked = _list_unmarked(releases)
    if not grades:
        raise _make_nothing_error(name, unmarked)
    lines = list_released_lines(folder.ledger.list_entries(kind="released"), name)
    before = {grade.student: as_released(grade, lines.get(grade.student)) for grade in grades}
    changes = [change_text(grade) for grade in before.values() if grade.unreleased is not None]
    _require_consent(name, changes, reporter or SilentReporter())
    is_closed = _has_closed(folder, name)
    for release in releases:
        _publish_feedback(grade_store, release, is_closed)
    drafts = [
        draft_released_line(name, grade, by, before[grade.student].change) for grade in grades
    ]
    folder.ledger.append_all(
        [draft for draft in drafts if _is_change(draft, lines.get(draft.student))]
    )
    return ReleaseResult(
        assignment=name,
        students=tuple(grade.student for grade in grades),
        waiting=_list_waiting(folder, releases),
        changes=tuple(changes),
        unmarked=unmarked,
    )


def _list_waiting(folder: CourseFolder, releases: Sequence[_SeatRelease]) -> tuple[str, ...]:
    """Return the seats and students without a grade to release, but nobody who left the course."""
    active = {student.id for student in folder.list_students()}
    present = [release for release in releases if active.intersection(release.seat.students)]
    return tuple(
        name
        for release in present
        for name in release.waiting_names
        if name == release.seat.name or name in active
    )


def _list_unmarked(releases: Sequence[_SeatRelease]) -> tuple[str, ...]:
    """Return the students who lack marks or have outdated ones, each with the items."""
    return tuple(
        f"{grade.student}: {'; '.join(filter(None, [grade.problem, grade.outdated_marks_text]))}"
        for release in releases
        for grade in release.waiting
        if grade.items and (grade.stamp.number or any(item.mark for item in grade.items))
    )


def _make_nothing_error(name: str, unmarked: Sequence[str]) -> NotFoundError:
    if not unmarked:
        return NotFoundError(
            f"{name} has no graded submission yet", hint=f"labctl course grade {name}"
        )
    return NotFoundError(
        f"{name} has no complete grade yet",
        why="\n".join(unmarked[:MOST_NAMED]),
        hint=f"labctl course mark {name} --next",
    )


def _list_releases(grade_store: GradeStore, seats: Sequence[Seat]) -> list[_SeatRelease]:
    """Return what can be released for each seat."""
    students = [Student(id=student) for seat in seats for student in seat.students]
    grades = {
        grade.student: grade
        for grade in list_current_grades(grade_store.folder, grade_store.name, students)
    }
    releases = []
    for seat in seats:
        record = grade_store.read_record(seat.name)
        record = record if record is not None and record.raw else None
        own = [grades[one] for one in seat.students if not grades[one].excused]
        ready = tuple(grade for grade in own if _is_ready(grade, record))
        waiting = tuple(grade for grade in own if grade not in ready)
        releases.append(_SeatRelease(seat=seat, record=record, ready=ready, waiting=waiting))
    return releases


def _is_ready(grade: Grade, record: GradeRecord | None) -> bool:
    """Tell whether a grade can be released. A damaged correction is reported when it is read."""
    if not grade.items:
        return record is not None
    is_complete = grade.score is not None and any(item.mark for item in grade.items)
    return is_complete and not grade.outdated_marks


def _require_consent(name: str, changes: Sequence[str], reporter: Reporter) -> None:
    if not changes:
        return
    grades = "1 grade" if len(changes) == 1 else f"{len(changes)} grades"
    question = f"change {grades} of {name} that students have already seen?"
    if not reporter.confirm(Question(question=question, detail="\n".join(changes))):
        raise PolicyError(
            "nothing was released",
            why=f"{grades} that students have seen would change",
        )


def _is_change(draft: CourseLedgerDraft, line: CourseLedgerEntry | None) -> bool:
    return line is None or line.detail != draft.detail


def _publish_feedback(grade_store: GradeStore, release: _SeatRelease, is_closed: bool) -> None:
    """Give each student of a seat their own feedback, with the corrections and marks for them."""
    receiver, record = Receiver(grade_store.folder.drop), release.record
    grades = {grade.student: grade for grade in release.ready}
    comments = _list_comments(grade_store, release.seat)
    owners = list(grades)
    if record is not None and any(not grade.items for grade in release.ready):
        left_out = set(release.seat.students) - set(grades)
        owners = [owner for owner in list_owners(record) if owner not in left_out]
    for owner in owners:
        own, grade = record, grades.get(owner)
        if own is not None:
            own = _apply_correction(grade_store, owner, own, grade)
        if grade is not None and grade.items:
            own = build_total_record(grade_store.name, release.seat.name, grade, own)
        assert own is not None
        feedback = _build_feedback(grade_store, own, grade, comments, is_closed=is_closed)
        directory = grade_store.grade_directory(owner)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(directory / FEEDBACK, feedback.page.encode())
        receiver.release_feedback(grade_store.name, owner, feedback)


def _list_comments(grade_store: GradeStore, seat: Seat) -> tuple[LineComment, ...]:
    """Return the comments on all submissions of a seat."""
    entries = grade_store.folder.ledger.list_entries(kind="comment")
    owners = (seat.name, *seat.students)
    comments = read_comments(entries, grade_store.name)
    return tuple(comment for comment in comments if comment.student in owners)


def _apply_correction(
    grade_store: GradeStore, owner: str, record: GradeRecord, grade: Grade | None
) -> GradeRecord:
    """Return the record with the corrections in the owner's results.json."""
    if grade is None or not grade.corrected or record.raw is None:
        return record
    file = grade_store.grade_directory(owner) / RESULTS
    try:
        corrected = parse_results(file.read_text(errors="replace"), record.points)
    except ValueError as error:
        raise LabError(
            f"the correction for {owner} cannot be released",
            why=f"{file}: {error}",
            hint=f"edit it, or delete it:\nrm {file} && labctl course grade {grade_store.name}",
        ) from None
    output = without_lateness_note(
        corrected.output,
        score=record.raw.score,
        points=record.points,
        penalty=record.penalty,
        late_s=record.late_s,
        free_days=record.free_days.text,
    )
    return msgspec.structs.replace(
        record,
        raw=msgspec.structs.replace(corrected, output=output),
        score=grade.final,
        late_s=grade.stamp.late_s,
        penalty=grade.stamp.penalty,
    )


def _build_feedback(
    grade_store: GradeStore,
    record: GradeRecord,
    grade: Grade | None,
    comments: Sequence[LineComment],
    *,
    is_closed: bool,
) -> Feedback:
    results = select_shown(build_results(record), is_closed=is_closed)
    notes = describe_comments(comments, record.number)
    texts = [notes, render_text(results)]
    if grade is not None and grade.items:
        marks = describe_marks(grade)
        texts.insert(0, marks)
        output = "\n".join(filter(None, [marks, results.output]))
        results = add_items(msgspec.structs.replace(results, output=output), grade.items)
    return Feedback(
        assignment=record.assignment,
        number=record.number,
        score=record.score or 0.0,
        points=record.points,
        text="\n".join(filter(None, texts)),
        page=render_page(
            record,
            results,
            grade_store.read_output(record.seat),
            notes,
            _describe_arrival(grade_store.folder, record.received),
        ),
    )


def _describe_arrival(folder: CourseFolder, received: str) -> str:
    """Write when a submission was received, in the course's zone; "" without one."""
    if not received:
        return ""
    at = datetime.fromisoformat(received).timestamp()
    return local_time_text(at, find_zone(folder.config))


def _has_closed(folder: CourseFolder, assignment: str) -> bool:
    """Whether no student can submit any more, or all are late if late work is always accepted.

    An assignment without a due time never closes.
    """
    deadline = DeadlineJudge(folder, assignment)
    seats = list_assignment_seats(folder, assignment)
    return deadline.rules.due is not None and all(deadline.has_closed(seat) for seat in seats)

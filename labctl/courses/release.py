"""Releasing feedback: students see nothing of a grade before it is released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from labctl.config.identity import write_private
from labctl.courses.assignment_seats import choose_seats, list_assignment_seats
from labctl.courses.collect import find_rules
from labctl.courses.grade_store import GradeStore, list_owners
from labctl.courses.grades import list_current_grades, record_released_scores
from labctl.courses.grading.feedback import render_page
from labctl.courses.grading.record import FEEDBACK, RESULTS, GradeRecord, build_results
from labctl.courses.grading.results import parse_results, without_lateness_note
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
from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.events import Question, Reporter, SilentReporter
from labctl.model import Value
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver


class ReleaseResult(Value, frozen=True):
    """The result of a release: `students` can read their feedback now.

    `waiting` seats have no grade to release. `changes` lists grades that were released before with
    another score.
    """

    assignment: str
    students: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def release_grades(
    folder: CourseFolder,
    name: str,
    seats: Sequence[Seat] = (),
    *,
    by: str = "",
    reporter: Reporter | None = None,
) -> ReleaseResult:
    """Write `feedback.html` for each grade, make it available to students, and update the ledger.

    Seats whose grading failed are left out. Repeating it updates the feedback. If a released score
    would change, `reporter` asks for consent first: PolicyError without it, and nothing is
    released. NotFoundError if nothing is graded yet.
    """
    find_rules(folder, name)
    record_released_scores(folder, name, by)
    grade_store = GradeStore(folder, name, by)
    chosen = choose_seats(list_assignment_seats(folder, name, by=by), seats)
    records = {seat.name: grade_store.read_record(seat.name) for seat in chosen}
    graded = [
        (seat, record)
        for seat in chosen
        if (record := records[seat.name]) is not None and record.raw
    ]
    students = [Student(id=student) for seat, _ in graded for student in seat.students]
    if not students:
        raise NotFoundError(
            f"{name} has no graded submission yet", hint=f"labctl course grade {name}"
        )
    lines = list_released_lines(folder.ledger.list_entries(kind="released"), name)
    grades = list_current_grades(folder, name, students)
    before = {grade.student: as_released(grade, lines.get(grade.student)) for grade in grades}
    changes = [change_text(grade) for grade in before.values() if grade.unreleased is not None]
    _require_consent(name, changes, reporter or SilentReporter())
    now = {grade.student: grade for grade in grades}
    for _, record in graded:
        _publish_feedback(grade_store, record, now)
    drafts = [
        draft_released_line(name, grade, by, before[grade.student].change) for grade in grades
    ]
    folder.ledger.append_all(
        [draft for draft in drafts if _is_change(draft, lines.get(draft.student))]
    )
    return ReleaseResult(
        assignment=name,
        students=tuple(dict.fromkeys(student.id for student in students)),
        waiting=tuple(seat.name for seat in chosen if (seat, records[seat.name]) not in graded),
        changes=tuple(changes),
    )


def _require_consent(name: str, changes: Sequence[str], reporter: Reporter) -> None:
    if not changes:
        return
    grades = "1 grade" if len(changes) == 1 else f"{len(changes)} grades"
    question = f"change {grades} of {name} that students have already seen?"
    if not reporter.confirm(Question(question=question, detail="\n".join(changes))):
        raise PolicyError(
            "nothing was released",
            why=f"{grades} that students have seen would change",
            hint=f"labctl course grades {name} --release --yes",
        )


def _is_change(draft: CourseLedgerDraft, line: CourseLedgerEntry | None) -> bool:
    return line is None or line.detail != draft.detail


def _publish_feedback(
    grade_store: GradeStore, record: GradeRecord, grades: Mapping[str, Grade]
) -> None:
    """Give each student of a seat their own feedback, with the corrections for them."""
    receiver = Receiver(grade_store.folder.drop)
    for owner in list_owners(record):
        feedback = _build_feedback(
            grade_store, _apply_correction(grade_store, owner, record, grades.get(owner))
        )
        write_private(grade_store.grade_directory(owner) / FEEDBACK, feedback.page.encode())
        receiver.release_feedback(grade_store.name, owner, feedback)


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
            hint=f"edit it, or delete it: rm {file}; labctl course grade {grade_store.name}",
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


def _build_feedback(grade_store: GradeStore, record: GradeRecord) -> Feedback:
    results = build_results(record)
    return Feedback(
        assignment=record.assignment,
        number=record.number,
        score=record.score or 0.0,
        points=record.points,
        text=results.output,
        page=render_page(record, results, grade_store.read_output(record.seat)),
    )

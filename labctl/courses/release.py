"""Releasing feedback: students see nothing of a grade before it is released."""

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
from labctl.courses.grading.results import parse_results, without_lateness_note
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
    """The result of a release: `students` can read their feedback now.

    `waiting` seats have no grade to release. `changes` lists grades that were released before with
    another score.
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
    """Write `feedback.html` for each grade, make it available to students, and update the ledger.

    Seats whose grading failed are left out. Repeating it updates the feedback. If a released score
    would change, `reporter` asks for consent first: PolicyError without it, and nothing is
    released. NotFoundError if nothing is graded yet.
    """
    rules_of(folder, name)
    keep_released(folder, name, by)
    shelf = Shelf(folder, name, by)
    chosen = choose_seats(assignment_seats(folder, name, by=by), seats)
    records = {seat.name: shelf.read(seat.name) for seat in chosen}
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
    lines = released_lines(folder.ledger.entries(kind="released"), name)
    grades = current_grades(folder, name, students)
    before = {grade.student: as_released(grade, lines.get(grade.student)) for grade in grades}
    changes = [change_text(grade) for grade in before.values() if grade.unreleased is not None]
    _require_consent(name, changes, reporter or Silent())
    now = {grade.student: grade for grade in grades}
    for _, record in graded:
        _publish_feedback(shelf, record, now)
    drafts = [released_line(name, grade, by, before[grade.student].change) for grade in grades]
    folder.ledger.append_all(
        [draft for draft in drafts if _is_change(draft, lines.get(draft.student))]
    )
    return Released(
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
    if not reporter.ask(Decision(question=question, detail="\n".join(changes))):
        raise PolicyError(
            "nothing was released",
            why=f"{grades} that students have seen would change",
            hint=f"labctl course grades {name} --release --yes",
        )


def _is_change(draft: Draft, line: Entry | None) -> bool:
    return line is None or line.detail != draft.detail


def _publish_feedback(shelf: Shelf, record: Record, grades: Mapping[str, Grade]) -> None:
    """Give each student of a seat their own feedback, with the corrections for them."""
    receiver = Receiver(shelf.folder.drop)
    for owner in owners(record):
        feedback = _build_feedback(
            shelf, _apply_correction(shelf, owner, record, grades.get(owner))
        )
        write_private(shelf.place(owner) / FEEDBACK, feedback.page.encode())
        receiver.give(shelf.name, owner, feedback)


def _apply_correction(shelf: Shelf, owner: str, record: Record, grade: Grade | None) -> Record:
    """Return the record with the corrections in the owner's results.json."""
    if grade is None or not grade.corrected or record.raw is None:
        return record
    file = shelf.place(owner) / RESULTS
    try:
        corrected = parse_results(file.read_text(errors="replace"), record.points)
    except ValueError as error:
        raise LabError(
            f"the correction for {owner} cannot be released",
            why=f"{file}: {error}",
            hint=f"edit it, or delete it: rm {file}; labctl course grade {shelf.name}",
        ) from None
    output = without_lateness_note(
        corrected.output,
        score=record.raw.score,
        points=record.points,
        penalty=record.penalty,
        late_s=record.late_s,
    )
    return msgspec.structs.replace(
        record,
        raw=msgspec.structs.replace(corrected, output=output),
        score=grade.final,
        late_s=grade.stamp.late_s,
        penalty=grade.stamp.penalty,
    )


def _build_feedback(shelf: Shelf, record: Record) -> Feedback:
    results = results_of(record)
    return Feedback(
        assignment=record.assignment,
        number=record.number,
        score=record.score or 0.0,
        points=record.points,
        text=results.output,
        page=page(record, results, shelf.output(record.seat)),
    )

"""The grades of an assignment, and the file to upload to the course system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from labctl.config.course_schema import AssignmentConfig
from labctl.config.document import quote
from labctl.config.reader import find_nearest
from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.creation import find_newest_import
from labctl.courses.grade_store import GradeStore
from labctl.courses.grading.record import RESULTS
from labctl.courses.grading.results import GraderTest, parse_results
from labctl.courses.lateness import (
    DeadlineJudge,
    compute_free_days,
    find_counting_receipt,
    reduce_penalty,
)
from labctl.courses.records import roster_formats
from labctl.courses.records.excuses import read_excuses
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.free_days import FreeDays
from labctl.courses.records.gradebook import (
    Grade,
    Stamp,
    add_marks,
    count_missing,
    excuse,
    hold_back,
    read_grades,
)
from labctl.courses.records.marks import list_items, read_marks
from labctl.courses.records.released_grades import (
    as_released,
    draft_released_line,
    is_complete,
    list_released_lines,
)
from labctl.courses.records.roster_import import compare, load_keys, read_table_file
from labctl.courses.records.student import Student
from labctl.courses.records.writeback import GradeExport, write_back
from labctl.errors import NotFoundError
from labctl.model import Value
from labctl.submissions.assignment import DeadlineStatus, count_late_days
from labctl.submissions.receipt import Receipt
from labctl.submissions.receiver import Receiver


class StudentTests(Value, frozen=True):
    """The tests in one student's results.json, or their team's; () without any."""

    student: str
    tests: tuple[GraderTest, ...] = ()

    @property
    def failed(self) -> tuple[GraderTest, ...]:
        """The tests that did not give all of their points."""
        return tuple(
            test
            for test in self.tests
            if test.status == "failed" or (test.score or 0.0) < (test.max_score or 0.0)
        )


def list_student_tests(folder: CourseFolder, assignment: str) -> list[StudentTests]:
    """Return the tests of each student of the course, with those that students never see.

    NotFoundError if course.yaml has no such assignment.
    """
    grades = list_current_grades(folder, assignment, folder.list_students(active_only=True))
    store = GradeStore(folder, assignment)
    return [StudentTests(student=grade.student, tests=read_tests(store, grade)) for grade in grades]


def read_tests(store: GradeStore, grade: Grade) -> tuple[GraderTest, ...]:
    """Return the tests in the results.json of a grade; () without any."""
    if not grade.owner or grade.automatic is None:
        return ()
    text = (store.grade_directory(grade.owner) / RESULTS).read_text(errors="replace")
    try:
        return parse_results(text, grade.points).tests
    except ValueError:
        return ()


def list_grades(folder: CourseFolder, assignment: str, *, everybody: bool = False) -> list[Grade]:
    """Return a grade for each student in the course; with `everybody`, for those who left too.

    A released grade shows what was released; a change since then is its `unreleased`.
    NotFoundError if course.yaml has no such assignment.
    """
    lines = list_released_lines(folder.ledger.list_entries(kind="released"), assignment)
    current = list_current_grades(
        folder, assignment, folder.list_students(active_only=not everybody)
    )
    return [as_released(grade, lines.get(grade.student)) for grade in current]


def list_current_grades(
    folder: CourseFolder, assignment: str, students: Sequence[Student]
) -> list[Grade]:
    """Return the present grades of these students, corrections included, released or not."""
    rules = _find_rules(folder, assignment)
    released = list_released_lines(folder.ledger.list_entries(kind="released"), assignment)
    all_seats = list_assignment_seats(folder, assignment)
    seats = {student: seat.name for seat in all_seats for student in seat.students}
    stored = read_grades(
        folder.grades,
        assignment,
        rules.points,
        students,
        _judge_submissions(folder, assignment, all_seats),
        frozenset(released),
        seats,
    )
    grade_store = GradeStore(folder, assignment)
    corrected = [
        msgspec.structs.replace(
            grade, corrected=bool(grade.owner) and grade_store.is_corrected(grade.owner)
        )
        for grade in stored
    ]
    return _apply_decisions(folder, assignment, corrected, all_seats)


def _find_rules(folder: CourseFolder, assignment: str) -> AssignmentConfig:
    rules = folder.config.assignments.get(assignment)
    if rules is None:
        names = list(folder.config.assignments)
        near = find_nearest(assignment, names)
        raise NotFoundError(
            f"there is no assignment {quote(assignment)}",
            why=f"course.yaml has {', '.join(names) or 'none yet'}",
            hint=f"labctl course grades {near}" if near else f"edit {folder.config.path}",
        )
    return rules


def _apply_decisions(
    folder: CourseFolder, assignment: str, grades: Sequence[Grade], seats: Sequence[Seat]
) -> list[Grade]:
    """Add the marks, the excuses, and what counts for missing submissions."""
    rules, entries = folder.config.assignments[assignment], folder.ledger.list_entries()
    marks, excuses = read_marks(entries, assignment), read_excuses(entries, assignment)
    closed = set[str]()
    if folder.config.is_missing_zero(assignment):
        deadline = DeadlineJudge(folder, assignment)
        for seat in seats:
            if deadline.has_closed(seat):
                closed.update(seat.students)
    decided = []
    for grade in grades:
        items = list_items(rules.rubric, marks.get(grade.student, {}))
        grade = add_marks(grade, rules.graded_points, items)
        if (reason := excuses.get((assignment, grade.student))) is not None:
            grade = excuse(grade, reason.text)
        decided.append(count_missing(grade) if grade.student in closed else grade)
    return decided


def record_released_scores(folder: CourseFolder, assignment: str, by: str = "") -> None:
    """Add the score of released grades to the ledger where an earlier version wrote none."""
    lines = list_released_lines(folder.ledger.list_entries(kind="released"), assignment)
    incomplete = [
        Student(id=student) for student, line in lines.items() if student and not is_complete(line)
    ]
    current = list_current_grades(folder, assignment, incomplete) if incomplete else []
    folder.ledger.append_all(
        [draft_released_line(assignment, grade, by) for grade in current if grade.score is not None]
    )


def _judge_submissions(
    folder: CourseFolder, assignment: str, seats: Sequence[Seat]
) -> dict[str, Stamp]:
    """Return the stamps of the submissions that count, by seat and by student.

    They follow from the rules and extensions of now.
    """
    receiver, deadline = Receiver(folder.drop), DeadlineJudge(folder, assignment)
    rules, receipts, status = deadline.rules, dict[str, Receipt](), dict[str, DeadlineStatus]()
    for seat in seats:
        receipt = find_counting_receipt(receiver, deadline, assignment, seat)
        if receipt is not None:
            receipts[seat.name] = receipt
            status[seat.name] = deadline.judge(seat, receipt.received_at)
    days = {name: count_late_days(one.late_s, rules.grace) for name, one in status.items()}
    free_days = compute_free_days(folder, assignment, days)
    judged = {}
    for seat in seats:
        if seat.name not in status:
            continue
        late_s, spent = status[seat.name].late_s, free_days.get(seat.name, FreeDays())
        stamp = Stamp(
            number=receipts[seat.name].number,
            received=receipts[seat.name].received,
            late_s=late_s,
            penalty=reduce_penalty(rules, late_s, spent),
            free_days=spent,
        )
        judged.update(dict.fromkeys((seat.name, *seat.students), stamp))
    return judged


def export_grades(
    folder: CourseFolder,
    assignment: str,
    *,
    to: str = "",
    penalty: bool = True,
    rubric: bool = False,
    dropped: Mapping[str, str] | None = None,
) -> GradeExport:
    """Return the grades in the format of the newest import, or in format `to`; write nothing.

    A grade with marks for an older submission is held back, as a release does.
    `dropped` says, by student, why a grade does not count; None if the assignment is in no group.
    With `rubric` and the format csv, labctl's own table has a column for each item and its grader.
    """
    all_grades = list_grades(folder, assignment, everybody=True)
    held_back = tuple(grade.student for grade in all_grades if grade.is_held_back)
    path = find_newest_import(folder)
    _, table = read_table_file(path)
    keys = load_keys(folder.private)
    name = roster_formats.detect_format(table)
    # If the keys were lost, students are matched again by mail address and name.
    students = folder.list_students(active_only=False)
    diff = compare(table, str(path), students, keys, keep=True)
    export = write_back(
        table,
        name,
        assignment,
        [hold_back(grade) for grade in all_grades],
        diff.keys.keys[name],
        to=to,
        penalty=penalty,
        rubric=rubric,
        dropped=dropped,
    )
    return msgspec.structs.replace(export, held_back=held_back)

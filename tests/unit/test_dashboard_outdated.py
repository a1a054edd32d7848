"""Marks for an older submission than the one that counts: the dashboard says what to mark again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_bed import Bed, Visitor, wait_until
from marking_bed import hand_in_files, make_marking

from labctl.courses.grades import list_grades
from labctl.courses.grading.record import FILE, RESULTS, GradeRecord, build_results, encode
from labctl.courses.grading.results import GradeResults
from labctl.courses.grading.results import encode as encode_results
from labctl.courses.records.excuses import draft_excuse_line
from labctl.courses.records.marks import MarkedSubmission, draft_mark_line
from labctl.submissions.receipt import utc_text
from labctl.web import factory
from labctl.web.listing import count_seats
from labctl.web.snapshot import SnapshotTaker

PAGE = "/assignments/hw3"
# eight days before the due time, which is in seven days
EARLY_S = -8 * 86_400


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """lovelace submitted twice. The code was marked for the first one, the rest for the second."""
    made = make_marking(tmp_path)
    for number in (1, 2):
        files = {"code/train.py": b"1"}
        hand_in_files(made, "lovelace", files, number=number, late_s=EARLY_S + number)
    directory = made.folder.grades / "hw3" / "lovelace"
    directory.mkdir(parents=True)
    (directory / RESULTS).write_text('{"score": 30}')
    mark(made, "code", 1)
    mark(made, "presentation", 2)
    yield made
    made.state.close()


def mark(bed: Bed, item: str, number: int) -> None:
    """Mark an item for this submission."""
    due = bed.folder.config.assignments["hw3"].due
    assert due is not None
    received = utc_text(due.at + EARLY_S + number)
    submission = MarkedSubmission(number=number, received=received)
    line = draft_mark_line("hw3", "lovelace", "lovelace", item, 20, submission=submission)
    bed.folder.ledger.append_all([line])


def test_the_dashboard_shows_what_to_mark_again(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "EVERY_S", 0.1)
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    page = visitor.ask(PAGE)[2]
    assert "<small> of 1; 1 to mark again</small>" in page
    assert '<small class="trouble">mark again: code</small>' in page
    assert "mark again: code" in visitor.ask(f"/seats/{bed.seat(0).pseudonym}")[2]
    shown = visitor.ask(f"{PAGE}?show=outdated")[2]
    assert ("lovelace" in shown, "turing" in shown) == (True, False)
    mark(bed, "code", 2)
    wait_until(lambda: "mark again: " not in visitor.ask(PAGE)[2])
    assert "1 to mark again" not in visitor.ask(PAGE)[2]
    stop.set()


def require_same(bed: Bed, outdated: tuple[str, ...]) -> None:
    grades = {grade.student: grade for grade in list_grades(bed.folder, "hw3")}
    shown = SnapshotTaker(bed.folder, bed.state).take().person_by_id["lovelace"].grade("hw3")
    assert shown is not None
    assert shown.outdated == tuple(grades["lovelace"].outdated_marks) == outdated


def test_it_is_what_the_command_line_says(bed: Bed) -> None:
    require_same(bed, ("code",))


def test_what_was_graded_automatically_is_what_marks_are_compared_with(bed: Bed) -> None:
    """Until the second submission is graded too, as on the command line."""
    (bed.folder.grades / "hw3" / "lovelace" / RESULTS).unlink()
    due = bed.folder.config.assignments["hw3"].due
    assert due is not None
    record = GradeRecord(
        assignment="hw3", seat="lovelace", students=("lovelace",), student="lovelace", number=1,
        received=utc_text(due.at + EARLY_S + 1), bundle_sha256="", key="k", outcome="graded",
        points=40, score=30, raw=GradeResults(score=30),
    )  # fmt: skip
    place = bed.folder.grades / "hw3" / "lovelace"
    (place / FILE).write_bytes(encode(record))
    (place / RESULTS).write_bytes(encode_results(build_results(record)))
    require_same(bed, ())


def test_an_excused_student_has_nothing_to_mark_again(bed: Bed) -> None:
    excuse = draft_excuse_line("hw3", "lovelace", "lovelace", excused=True, why="ill")
    bed.folder.ledger.append_all([excuse])
    people = SnapshotTaker(bed.folder, bed.state).take().people
    assert count_seats(people, "hw3").outdated == 0

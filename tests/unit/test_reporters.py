"""What flows agree to without a user: each Reporter answers by its policy, and shows its events."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.courses.grading_server import _make_upload_reporter
from labctl.courses.scheduler import make_course_log_reporter
from labctl.courses.seat_reporter import SeatNews, make_quiet_reporter, make_seat_reporter
from labctl.events import (
    AGREE_TO_NOTHING,
    AGREE_TO_PRICES,
    Event,
    Note,
    PolicyReporter,
    Progress,
    Question,
    Reporter,
    Step,
)
from labctl.keeper.labs import make_log_reporter
from labctl.services.background_forwards import _make_file_reporter

OTHER = Question(question="overwrite it?")
PRICE = Question(question="pay it?", about="price")
BILLING = Question(question="without an end?", about="billing")
TYPED = Question(question="which?", typed="digits")
TYPED_PRICE = Question(question="which?", about="price", typed="digits", default=True)
QUESTIONS = (OTHER, PRICE, BILLING, TYPED, TYPED_PRICE)
EVENTS = (
    Step(name="begin"),
    Step(name="begin", done=True, detail="2 s"),
    Progress(name="push", done=1, total=4, unit="bytes"),
    Note(text="note"),
    Note(text="careful", level="warning"),
    Note(text="line", level="detail"),
)


class Person:
    """Records what is shown and asked; answers no unless told otherwise."""

    def __init__(self, answer: bool = False) -> None:
        self.shown: list[Event] = []
        self.asked: list[Question] = []
        self.answer = answer

    def emit(self, event: Event) -> None:
        self.shown.append(event)

    def confirm(self, decision: Question) -> bool:
        self.asked.append(decision)
        return self.answer


def ignore(name: str, text: str) -> None:
    return


def agreed(reporter: Reporter) -> tuple[Question, ...]:
    return tuple(question for question in QUESTIONS if reporter.confirm(question))


def test_each_policy_agrees_to_its_questions_only(tmp_path: Path) -> None:
    silent = PolicyReporter(lambda event: None)
    person = Person()
    assert agreed(silent) == ()
    assert agreed(_make_file_reporter(str(tmp_path / "log"))) == ()
    assert agreed(make_course_log_reporter(ignore)) == QUESTIONS
    assert agreed(make_log_reporter(ignore, "digits")) == (PRICE, TYPED_PRICE)
    assert agreed(make_seat_reporter("ada", person, agreed=True)) == QUESTIONS
    assert agreed(make_seat_reporter("ada", person, agreed=False)) == (OTHER, TYPED)
    assert person.asked == []


@pytest.mark.parametrize("answer", [False, True])
def test_only_what_a_policy_leaves_open_is_asked(answer: bool) -> None:
    cases = (
        (_make_upload_reporter, (TYPED, TYPED_PRICE)),
        (make_quiet_reporter, QUESTIONS),
        (lambda one: PolicyReporter(one.emit, AGREE_TO_PRICES, one), (OTHER, BILLING, TYPED)),
        (lambda one: PolicyReporter(one.emit, AGREE_TO_NOTHING, one), QUESTIONS),
    )
    for make, asked in cases:
        person = Person(answer)
        expected = tuple(one for one in QUESTIONS if answer or one not in asked)
        assert agreed(make(person)) == expected
        assert tuple(person.asked) == asked


def test_each_shows_its_events_only(tmp_path: Path) -> None:
    lines: list[str] = []
    seats, uploads, quiet = Person(), Person(), Person()
    reporters: list[Reporter] = [
        make_log_reporter(lambda name, text: lines.append(f"{name}: {text}"), "digits"),
        make_seat_reporter("ada", seats, agreed=False),
        _make_upload_reporter(uploads),
        make_quiet_reporter(quiet),
        _make_file_reporter(str(tmp_path / "log")),
    ]
    for reporter in reporters:
        for event in EVENTS:
            reporter.emit(event)
    assert lines == [
        f"digits: {text}" for text in ("begin", "begin: done (2 s)", "note", "careful")
    ]
    assert seats.shown == [
        SeatNews(seat="ada", text="begin"),
        SeatNews(seat="ada", text="push 25%"),
        SeatNews(seat="ada", text="note"),
        SeatNews(seat="ada", text="careful", warning=True),
    ]
    assert uploads.shown == [*EVENTS[:2], *EVENTS[3:]]
    assert quiet.shown == list(EVENTS[3:])
    written = (tmp_path / "log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in written] == ["note", "careful", "line"]
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_keepers_log_has_warnings_only() -> None:
    lines: list[tuple[str, str]] = []
    reporter = make_course_log_reporter(lambda name, text: lines.append((name, text)))
    for event in (
        *EVENTS,
        SeatNews(seat="ada", text="x"),
        SeatNews(seat="ada", text="y", warning=True),
    ):
        reporter.emit(event)
    assert lines == [("", "careful"), ("ada", "y")]

"""What an assignment's file may say, and what its rules say of a moment."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from submission_bed import DUE, DUE_AT, HOST_KEY

from labctl.config.times import ANY_S, parse_late, parse_moment
from labctl.errors import ConfigError, Problem
from labctl.submissions.assignment import (
    Assignment,
    Ticket,
    assignment_text,
    judge,
    load_assignment,
    parse_assignment,
)

PUBLIC = "ed25519:" + "A" * 43 + "="
TEXT = f"""\
assignment: hw3
due: {DUE}
late: 48h
penalty: 10%
hand_in: ssh://drop@course.example:2222
host_key: {HOST_KEY}
receiver: {PUBLIC}
"""


def read(text: str) -> tuple[Assignment | None, list[Problem]]:
    problems: list[Problem] = []
    return parse_assignment(text.encode(), problems), problems


def rules(**other: object) -> Assignment:
    found, _ = read(TEXT)
    assert found is not None
    return msgspec.structs.replace(found, **other)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-28 23:59 Europe/Berlin", 1795906740),
        ("2026-11-28T23:59+01:00", 1795906740),
        ("2026-11-28T22:59:00Z", 1795906740),
        ("2026-11-28 22:59 UTC", 1795906740),
        ("2026-07-01 12:00 Europe/Berlin", 1782900000),
        ("2026-07-01 12:00 America/New_York", 1782921600),
    ],
)
def test_a_time_has_a_zone(text: str, at: int) -> None:
    assert parse_moment(text).at == at


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2026-11-28 23:59", "not a time with a zone"),
        ("tomorrow", "not a time with a zone"),
        ("2026-02-30 10:00 UTC", "is not a time"),
        ("2026-11-28 25:00 UTC", "is not a time"),
        ("2026-11-28 23:59 Europe/Atlantis", "has no time zone"),
        ("2026-11-28 23:59 ../../etc/passwd", "has no time zone"),
        ("2026-03-29 02:30 Europe/Berlin", "clocks skip this time there; write another time"),
        (
            "2026-11-01 01:30 America/New_York",
            "occurs twice there; write 2026-11-01T01:30-04:00 or 2026-11-01T01:30-05:00",
        ),
        ("2026-11-28T23:59+99:00", "is not a time"),
    ],
)
def test_a_time_that_is_none_says_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_moment(text)


def test_a_moment_is_written_so_that_no_machine_need_know_its_zone() -> None:
    moment = parse_moment("2026-07-01 12:00 Europe/Berlin")
    assert str(moment) == "2026-07-01T12:00:00+02:00"
    again = parse_moment(str(moment))
    assert (again.at, again.offset_s) == (moment.at, moment.offset_s)
    assert (moment.zone, again.zone) == ("Europe/Berlin", "")


@pytest.mark.parametrize(
    ("late", "penalty", "after_s", "accepted", "late_s", "off"),
    [
        (0, 0, -1, True, 0, 0),
        (0, 0, 0, True, 0, 0),
        (0, 0, 1, False, 1, 0),
        (2 * 86400, 10, 1, True, 1, 10),
        (2 * 86400, 10, 86400, True, 86400, 10),
        (2 * 86400, 10, 86401, True, 86401, 20),
        (2 * 86400, 10, 2 * 86400, True, 2 * 86400, 20),
        (2 * 86400, 10, 2 * 86400 + 1, False, 2 * 86400 + 1, 30),
        (ANY_S, 40, 400 * 86400, True, 400 * 86400, 100),
    ],
)
def test_what_counts_when(
    late: int, penalty: int, after_s: int, accepted: bool, late_s: int, off: int
) -> None:
    found = judge(rules(late=late, penalty=penalty), DUE_AT + after_s)
    assert (found.accepted, found.late_s, found.penalty) == (accepted, late_s, off)


def test_an_extension_moves_the_due_time_and_the_end() -> None:
    found = judge(rules(late=3600), DUE_AT + 86400 + 60, extension_s=86400)
    assert (found.accepted, found.late_s) == (True, 60)
    assert found.closes_at == DUE_AT + 86400 + 3600
    assert not judge(rules(late=3600), DUE_AT + 86400 + 3601, extension_s=86400).accepted


@pytest.mark.parametrize(
    ("after_s", "accepted", "late_s", "off", "in_grace_s"),
    [
        (10, True, 0, 0, 10),
        (600, True, 0, 0, 600),
        (601, True, 601, 10, 0),
        (86400 + 600, True, 86400 + 600, 10, 0),
        (86400 + 601, True, 86400 + 601, 20, 0),
    ],
)
def test_within_the_grace_period_nothing_is_late(
    after_s: int, accepted: bool, late_s: int, off: int, in_grace_s: int
) -> None:
    found = judge(rules(late=2 * 86400, penalty=10), DUE_AT + after_s, grace_s=600)
    assert (found.accepted, found.late_s, found.penalty) == (accepted, late_s, off)
    assert found.in_grace_s == in_grace_s
    never = judge(rules(late=0), DUE_AT + after_s, grace_s=600)
    assert never.accepted == (after_s <= 600)


def test_without_a_due_time_nothing_is_ever_late() -> None:
    found = judge(rules(due=None), 9e9)
    assert (found.accepted, found.closes_at, found.late_s) == (True, None, 0)


def test_the_file_says_what_it_was_made_of() -> None:
    whole = rules(course="ml-2026", require=("model", "report"), max_size=123_456_789)
    assert read(assignment_text(whole)) == (whole, [])


def test_a_ticket_survives_its_file() -> None:
    fields = {"key": "labs/hw3/alice/part-01", "policy": "eyJ9" * 300, "x": "a: 'b' \"c\" # d"}
    ticket = Ticket(
        url="https://bucket.s3.amazonaws.com/",
        expires=parse_moment("2026-11-28T00:00:00Z"),
        part_bytes=64 * 2**20,
        index=fields,
        parts=(fields, {**fields, "key": "other"}),
        receipts="https://bucket.s3.amazonaws.com/r.json?X-Amz-Signature=abc&y=%2F",
    )
    place = "s3://bucket/labs"
    whole = rules(hand_in=place, host_key="", student="alice", ticket=ticket)
    assert read(assignment_text(whole)) == (whole, [])


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=1, max_value=366 * 86400))
def test_a_late_rule_survives_its_file(seconds: int) -> None:
    whole = rules(late=seconds)
    found, _ = read(assignment_text(whole))
    assert found is not None
    assert found.late == seconds


def test_the_words_of_late_rules() -> None:
    assert [parse_late(text) for text in ("never", "any", "36h")] == [0, ANY_S, 36 * 3600]


def test_everything_wrong_is_told_at_once_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "assignment.yaml"
    file.write_text(
        "assignment: HW 3\ndue: 2026-11-28 23:59\nlate: sometimes\npenalty: 200%\n"
        "require: [model, poem]\nhand_in: ssh://-oProxyCommand=x@host\nrecever: x\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_assignment(file)
    said = {(one.path, one.line): one.message for one in caught.value.problems}
    assert set(said) >= {
        ("assignment", 1), ("due", 2), ("late", 3), ("penalty", 4), ("require[1]", 5),
        ("hand_in", 6), ("recever", 7),
    }  # fmt: skip
    assert "did you mean receiver" in said["recever", 7]
    assert any(one.path == "receiver" for one in caught.value.problems)


@pytest.mark.parametrize(
    "place",
    [
        "ssh://host",
        "ssh://-l@host",
        "ssh://drop@-oProxyCommand=id",
        "ssh://drop@host;id",
        "ssh://drop@host:99999",
        "ssh://drop@host:22/../x",
        "ssh://drop@ho st",
        "http://host/",
        "s3://bucket/../other",
        "file:///etc",
    ],
)
def test_places_that_are_none_are_refused(place: str) -> None:
    found, problems = read(TEXT.replace("ssh://drop@course.example:2222", f'"{place}"'))
    assert found is None
    assert [one.path for one in problems] == ["hand_in"]


def test_what_belongs_together_stands_together() -> None:
    _, problems = read(TEXT.replace(f"host_key: {HOST_KEY}\n", ""))
    assert [one.path for one in problems] == ["host_key"]
    bucket = TEXT.replace("ssh://drop@course.example:2222", "s3://bucket/labs")
    assert read(bucket.replace(f"host_key: {HOST_KEY}\n", ""))[1] == []
    _, problems = read(bucket + "student: alice\n")
    assert [one.path for one in problems] == ["student"]


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "assignment.yaml"
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError) as caught:
        load_assignment(file)
    assert caught.value.problems[0].message == "the file is empty"

"""What a course costs: per student, team and assignment, what was idle, what is still to come."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from labctl.config import CourseConfig, load_course
from labctl.config.course_schema import GradingConfig
from labctl.courses.plan import request_text
from labctl.courses.records import timetable
from labctl.courses.records.cost_report import CourseCosts, compute_course_costs
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.plan_changes import (
    describe_server_limits,
    list_cautions,
    list_changes,
    read_keys,
)
from labctl.courses.records.spending import RunningServer
from labctl.courses.records.student import Student
from labctl.model import Offer
from labctl.providers import QuotaRoom

HOUR, DAY = 3600.0, 86_400.0
COURSE = """
course: ml-2026
server: {provider: local, idle: 30m}
per_student: {budget: 20.00, ttl: 8h, max_ttl: 12h}
hours:
  - {days: [mon, wed], from: "10:00", to: "12:00", zone: Europe/Berlin, prewarm: 30m}
term: {from: 2026-10-01, to: 2026-10-31}
assignments:
  hw1: {due: "2026-10-10 00:00 UTC"}
  hw2: {due: "2026-10-20 00:00 UTC", late: 24h}
  notes: {}
"""
STUDENTS = (
    Student(id="ada", section="A"),
    Student(id="bob", team="t1"),
    Student(id="cy", team="t1"),
    Student(id="gone", active=False),
)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.fixture
def config(tmp_path: Path) -> CourseConfig:
    (tmp_path / "course.yaml").write_text(COURSE)
    return load_course(tmp_path, environ={"HOME": str(tmp_path)})


def life(
    seat: str, since: float, until: float, price: float, idle_s: float = 0.0
) -> list[CourseLedgerEntry]:
    """A server's three lines."""
    about = {"server_id": f"i-{seat}-{since:.0f}"}
    usd = (until - since) / HOUR * price
    spent = {**about, "from": since, "until": until, "usd": usd, "idle_s": idle_s}
    began = {**about, "usd_per_hour": price, "created_at": since}
    return [
        CourseLedgerEntry(n=0, at=since, kind="up", seat=seat, detail=began),
        CourseLedgerEntry(n=0, at=until, kind="cost", seat=seat, detail=spent),
        CourseLedgerEntry(n=0, at=until, kind="down", seat=seat, detail=about),
    ]


def costs(config: CourseConfig, entries: list[CourseLedgerEntry], now: str) -> CourseCosts:
    return compute_course_costs(config, STUDENTS, entries, at(now))


def test_a_teams_dollars_are_parted_and_who_left_keeps_theirs(config: CourseConfig) -> None:
    begin = at("2026-10-05")
    entries = [
        *life("ada", begin, begin + 2 * HOUR, 1.0),
        *life("t1", begin, begin + 4 * HOUR, 0.5),
        *life("gone", begin, begin + HOUR, 3.0),
    ]
    found = costs(config, entries, "2026-10-06")
    assert {one.student: one.usd for one in found.students} == pytest.approx(
        {"ada": 2.0, "bob": 1.0, "cy": 1.0, "gone": 3.0}
    )
    assert {one.seat: one.left_usd for one in found.seats} == pytest.approx(
        {"ada": 18.0, "t1": 18.0, "gone": 17.0}
    )
    assert found.usd == pytest.approx(sum(one.usd for one in found.students))
    assert [one.share for one in found.seats] == pytest.approx([0.1, 0.1, 0.15])
    assert not found.complete


def test_every_dollar_belongs_to_the_assignment_that_was_due_next(config: CourseConfig) -> None:
    night = at("2026-10-09T22:00")
    entries = [
        *life("ada", night, night + 4 * HOUR, 1.0),
        *life("t1", at("2026-10-25"), at("2026-10-25T01:00"), 7.0),
    ]
    found = costs(config, entries, "2026-10-26").assignments
    assert [(one.assignment, one.usd, one.hours, one.seats) for one in found] == [
        ("hw1", pytest.approx(2.0), pytest.approx(2.0), 1),
        ("hw2", pytest.approx(2.0), pytest.approx(2.0), 1),
        ("", pytest.approx(7.0), pytest.approx(1.0), 1),
    ]


def test_the_most_expensive_idle_hours_come_first_and_neighbours_are_one(
    config: CourseConfig,
) -> None:
    begin = at("2026-10-05")
    first = life("ada", begin, begin + HOUR, 1.0, idle_s=HOUR)
    on = {"server_id": f"i-ada-{begin:.0f}", "from": begin + HOUR, "until": begin + 3 * HOUR}
    more = CourseLedgerEntry(
        n=0, at=0, kind="cost", seat="ada", detail={**on, "usd": 2.0, "idle_s": 1.5 * HOUR}
    )
    dear = life("t1", begin, begin + HOUR, 9.0, idle_s=0.9 * HOUR)
    busy = life("gone", begin, begin + HOUR, 99.0, idle_s=0.1 * HOUR)
    idle = costs(config, [*first, more, *dear, *busy], "2026-10-06").idle
    assert [(one.seat, one.usd, one.idle_hours) for one in idle] == [
        ("t1", pytest.approx(8.1), pytest.approx(0.9)),
        ("ada", pytest.approx(2.5), pytest.approx(2.5)),
    ]
    assert (idle[1].since, idle[1].until) == (begin, begin + 3 * HOUR)


def test_a_forecast_goes_on_as_in_the_last_two_weeks(config: CourseConfig) -> None:
    entries = [
        line
        for day in range(10)
        for line in life(
            "ada", at("2026-10-01") + day * DAY, at("2026-10-01") + day * DAY + HOUR, 0.5
        )
    ]
    found = costs(config, entries, "2026-10-11").forecast
    assert found.basis == "pace"
    assert found.usd_per_day == pytest.approx(0.5)
    # The term ends with the 31st in Berlin, an hour before it does in Greenwich by then.
    assert found.until == at("2026-10-31T23:00")
    assert found.expected_usd == pytest.approx(5.0 + 0.5 * (21 - 1 / 24))
    # Who has left spends nothing more.
    assert found.at_most_usd == pytest.approx(40.0)


def test_a_forecast_never_exceeds_the_budgets(config: CourseConfig) -> None:
    entries = life("ada", at("2026-10-01"), at("2026-10-05"), 0.2)
    found = costs(config, entries, "2026-10-05").forecast
    assert found.expected_usd == found.at_most_usd == pytest.approx(40.0)


def test_before_there_is_a_pace_class_hours_are_the_forecast(config: CourseConfig) -> None:
    entries = life("ada", at("2026-10-05T08:00"), at("2026-10-05T10:00"), 1.0)
    found = costs(config, entries, "2026-10-05T11:00").forecast
    # Seven more classes of 2.5 h with prewarming, two seats that somebody has.
    assert (found.basis, found.class_hours_left) == ("hours", pytest.approx(17.5))
    assert found.expected_usd == pytest.approx(2.0 + 17.5 * 2)


def test_without_anything_to_go_by_nothing_is_foretold(config: CourseConfig) -> None:
    found = costs(config, [], "2026-10-05").forecast
    assert (found.basis, found.expected_usd) == ("", None)
    assert found.at_most_usd == pytest.approx(40.0)


def test_what_lives_counts_by_its_tags(config: CourseConfig) -> None:
    living = [
        RunningServer(server_id="i", seat="ada", created_at=at("2026-10-05"), usd_per_hour=2.0)
    ]
    found = compute_course_costs(config, STUDENTS, [], at("2026-10-05T03:00"), living)
    assert found.complete
    assert found.usd == pytest.approx(6.0)


def test_class_hours_are_those_of_the_clocks_there(config: CourseConfig) -> None:
    # Clocks in Berlin go back on 25 October 2026: the class of the 26th is an hour later here.
    week = timetable.class_hours(
        config.hours, config.term, at("2026-10-26T08:30"), at("2026-10-26T11:00")
    )
    assert week == pytest.approx(2.5)
    before = timetable.class_hours(
        config.hours, config.term, at("2026-10-19T07:30"), at("2026-10-19T10:00")
    )
    assert before == pytest.approx(2.5)
    assert timetable.class_hours(config.hours, config.term, at("2026-11-01"), at("2026-12-01")) == 0
    twice = (*config.hours, *config.hours)
    assert timetable.class_hours(
        twice, config.term, at("2026-10-26"), at("2026-10-27")
    ) == pytest.approx(2.5)


def test_a_plan_tells_every_key_that_changed() -> None:
    before = read_keys(b"course: a\nserver: {gpu: T4}\nhours: [{days: [mon, wed]}]\n")
    after = read_keys(b"course: a\nserver: {gpu: A100, spot: never}\n")
    assert [(one.key, one.before, one.after) for one in list_changes(before, after)] == [
        ("server.gpu", "T4", "A100"),
        ("server.spot", "", "never"),
        ("hours", '[{"days": ["mon", "wed"]}]', ""),  # a terminal breaks the line at a space
    ]
    assert list_changes(after, after) == []
    (text,) = list_changes({}, {"a": "[draft"})
    assert text.after == "[draft"


def test_what_may_not_be_meant_is_said(config: CourseConfig, tmp_path: Path) -> None:
    said = " ".join(list_cautions(config, at("2026-10-12")))
    assert "without a keeper" in said
    assert "no store" in said
    assert "hw1 was due" in said
    assert "notes has no due time" in said
    assert "hw2 was due" not in said
    assert "no image: labs that name none get python:3.12-slim" in said
    named = msgspec.structs.replace(config.lab, origins={"image": "course.yaml:3"})
    said = " ".join(list_cautions(msgspec.structs.replace(config, lab=named), 0.0))
    assert "no image" not in said
    local = msgspec.structs.replace(config.lab.server, provider="local", on_this_machine=True)
    grading = GradingConfig(lab=msgspec.structs.replace(config.lab, server=local))
    told = list_cautions(msgspec.structs.replace(config, grading=grading), 0.0)
    assert "the grading server's provider is local" in " ".join(told)
    assert describe_server_limits(config) == (
        "after 8 h (12 h with `extend`), after 30 min without work or at $20.00"
    )


def test_the_request_for_a_quota_says_what_is_needed_and_names_nobody(config: CourseConfig) -> None:
    offer = Offer(provider="aws", type="g4dn.xlarge", region="us-east-1", spot=True)
    room = QuotaRoom(
        most=2, quota="G and VT, us-east-1", code="L-1", units="vCPUs", limit=8.0, each=4.0
    )
    text = request_text(config, offer, room, 60)
    assert "quota G and VT, us-east-1 (L-1) to 240 vCPUs. It allows 8 now." in text
    assert "60 servers of type g4dn.xlarge (spot, 4 vCPUs each)" in text
    assert "mon, wed 10:00-12:00 Europe/Berlin" in text
    assert "from 2026-10-01 to 2026-10-31" in text
    assert config.name not in text

"""Class hours by the clocks of their zones, a term's ends, and the ledger's copy."""

from __future__ import annotations

import json
import sys
from datetime import UTC, date, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import pytest

from labctl.config.course_schema import ClassHours, Term
from labctl.courses.backup import LedgerBackup, _find_missing
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.timetable import (
    find_just_ended,
    find_phase,
    list_lessons,
    short_time_text,
)
from labctl.errors import ConnectError, PolicyError, ProviderError
from labctl.model import Need, Offer
from labctl.providers import ProviderContext
from labctl.providers.course import CourseProvider, CourseProviderSettings

sys.path.append(str(Path(__file__).parents[1] / "flow"))
from course_keeper_context import course_folder

BERLIN = ZoneInfo("Europe/Berlin")
HOURS = (ClassHours(days=("mon", "wed"), begins=10 * 3600, ends=12 * 3600, zone="Europe/Berlin"),)
TERM = Term(first=date(2026, 9, 1), last=date(2027, 1, 31))


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("2026-11-23 09:39", "off"),
        ("2026-11-23 09:40", "prewarm"),
        ("2026-11-23 10:00", "class"),
        ("2026-11-23 11:59", "class"),
        ("2026-11-23 12:00", "off"),
        ("2026-11-24 10:30", "off"),  # a Tuesday
        ("2026-11-25 10:30", "class"),
        ("2026-08-31 10:30", "off"),  # before the term
        ("2027-02-01 10:30", "off"),  # after it
    ],
)
def test_phase_of_the_week(now: str, expected: str) -> None:
    assert find_phase(HOURS, TERM, at(now))[0] == expected


def test_hours_are_those_of_their_zone_on_both_sides_of_a_change() -> None:
    """Clocks in Berlin go back on 2026-10-25."""
    before = [one.begins for one in list_lessons(HOURS, TERM, at("2026-10-21 12:00"))]
    assert at("2026-10-21 10:00") in before
    assert at("2026-10-26 10:00") in before
    assert at("2026-10-26 10:00") - at("2026-10-21 10:00") == 5 * 86_400 + 3600


def test_a_class_that_goes_on_hides_another_ones_end() -> None:
    second = ClassHours(days=("mon",), begins=11 * 3600, ends=13 * 3600, zone="Europe/Berlin")
    both = (*HOURS, second)
    assert find_just_ended(both, TERM, at("2026-11-23 12:10"), 7200) is None
    over = find_just_ended(both, TERM, at("2026-11-23 13:10"), 7200)
    assert over is not None
    assert over.ends == at("2026-11-23 13:00")
    assert find_just_ended(both, TERM, at("2026-11-23 15:10"), 7200) is None


def test_midnight_ends_a_day() -> None:
    late = (ClassHours(days=("sun",), begins=22 * 3600, ends=24 * 3600, zone="UTC", prewarm=0),)
    utc = ZoneInfo("UTC")
    current, lesson = find_phase(late, None, at("2026-11-22 23:59", utc))
    assert (current, lesson and lesson.ends) == ("class", at("2026-11-23 00:00", utc))
    assert find_phase(late, None, at("2026-11-23 00:00", utc)) == ("off", None)


class Drawer:
    """A store of one course, in memory."""

    url = "s3://bucket/ml"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.writes = 0

    def read(self, key: str) -> bytes | None:
        return self.files.get(key)

    def write(self, key: str, data: bytes | Path) -> None:
        assert isinstance(data, bytes)
        self.writes += 1
        self.files[key] = data


def backup(folder: CourseFolder, drawer: Drawer) -> LedgerBackup:
    return LedgerBackup(folder, drawer)


def test_the_ledger_is_copied_when_it_has_grown(tmp_path: Path) -> None:
    folder, drawer = course_folder(tmp_path / "ml"), Drawer()
    folder.ledger.append("budget", seat="alice", usd=5.0)
    kept = backup(folder, drawer)
    assert kept.restore() == 0
    assert kept.save()
    writes = drawer.writes
    assert not kept.save()
    assert drawer.writes == writes
    folder.ledger.append("joined", seat="alice", student="alice")
    assert kept.save()
    assert len(drawer.files["ledger.jsonl"].splitlines()) == 2


def test_a_lost_ledger_comes_back_with_its_times_and_nothing_twice(tmp_path: Path) -> None:
    folder, drawer = course_folder(tmp_path / "ml"), Drawer()
    folder.ledger.append("cost", seat="alice", server_id="s", usd=3.0)
    folder.ledger.append("budget", seat="alice", usd=5.0)
    before = folder.ledger.list_entries()
    backup(folder, drawer).save()
    folder.ledger.path.unlink()
    folder.ledger.append("joined", seat="bob", student="bob")  # a new life has begun
    assert backup(folder, drawer).restore() == 2
    assert backup(folder, drawer).restore() == 0
    assert [(one.kind, one.at) for one in folder.ledger.list_entries()[1:]] == [
        (one.kind, one.at) for one in before
    ]


def test_another_courses_ledger_is_not_taken_over(tmp_path: Path) -> None:
    drawer = Drawer()
    backup(course_folder(tmp_path / "one"), drawer).save()
    with pytest.raises(PolicyError, match="ledger of another course"):
        backup(course_folder(tmp_path / "two"), drawer).restore()


def test_lines_are_compared_by_what_they_say() -> None:
    one = CourseLedgerEntry(n=1, at=5.0, kind="budget", seat="alice", detail={"usd": 5})
    assert _find_missing([msgspec.structs.replace(one, n=9)], [one]) == []
    assert len(_find_missing([one], [msgspec.structs.replace(one, at=6.0)])) == 1


class Wire:
    """A keeper that says whatever it likes."""

    def __init__(self, reply: object) -> None:
        self.reply = reply
        self.closed = False

    def exchange(self, line: bytes) -> bytes:
        if isinstance(self.reply, Exception):
            raise self.reply
        body = self.reply if isinstance(self.reply, bytes) else json.dumps(self.reply).encode()
        return body + b"\n"

    def close(self) -> None:
        self.closed = True


def provider(reply: object) -> CourseProvider:
    around = ProviderContext(
        data_dir=Path("/"),
        owner="alice",
        connect=lambda endpoint: None,
        settle_host_key=lambda endpoint: endpoint,
        progress=lambda text, done, total: None,
        talk=lambda endpoint, request: Wire(reply),
    )
    settings = CourseProviderSettings(
        keeper="ssh://k@keeper.example", host_key="ssh-ed25519 " + "A" * 68
    )
    return CourseProvider(settings, around)


SERVER = {
    "id": "course-1-2",
    "provider": "course",
    "lab": "digits",
    "lab_id": "0f1e2d3c4b5a",
    "alias": "digits",
    "endpoint": {"host": "192.0.2.7", "user": "student", "host_key": "ssh-ed25519 " + "A" * 68},
    "offer": {"provider": "course", "type": "small"},
    "created_at": 1.0,
    "state": "running",
}


def with_way(**way: object) -> dict[str, object]:
    endpoint = SERVER["endpoint"]
    assert isinstance(endpoint, dict)
    return {"server": {**SERVER, "endpoint": {**endpoint, **way}}}


def test_nothing_that_a_keeper_says_is_run_or_read_here() -> None:
    found = provider(with_way(proxy_command="id > /tmp/x", identity="/etc/passwd")).find("x")
    assert found is not None
    assert (found.endpoint.proxy_command, found.endpoint.identity) == ("", "")


@pytest.mark.parametrize(
    "reply",
    [
        b"hello",
        b"[1]",
        b"[" * 5000,
        {},
        {"server": "x"},
        {"server": {**SERVER, "id": "../../x"}},
        {"server": {**SERVER, "state": "happy"}},
        {"server": {**SERVER, "created_at": "now"}},
        {"server": {**SERVER, "offer": None}},
        {"server": [SERVER], "error": "no"},
        with_way(host="-oProxyCommand=id"),
        with_way(user="-l root"),
        with_way(port=99999),
        with_way(jump="a;id"),
        with_way(host_key="ssh-ed25519 AAAA\nhost ssh-rsa BBBB"),
    ],
)
def test_a_hostile_keeper_is_told_as_such(reply: object) -> None:
    with pytest.raises(ProviderError):
        provider(reply).find("x")


@pytest.mark.parametrize(
    "reply", [{}, {"offers": 5}, {"offers": [{"type": 5}]}, {"offers": [None]}]
)
def test_offers_that_are_none_are_the_keepers_error(reply: object) -> None:
    with pytest.raises(ProviderError):
        provider(reply).offers(Need())


def test_a_keepers_refusal_comes_as_it_was_meant() -> None:
    error = {"kind": "PolicyError", "what": "your budget is used up", "why": "x", "hint": "y"}
    with pytest.raises(PolicyError, match="used up"):
        provider({"error": error}).offers(Need())
    with pytest.raises(ConnectError):
        provider(ConnectError("no answer")).servers()
    offer = {"provider": "aws", "type": "g4dn.xlarge", "price_usd_per_hour": 0.5}
    assert provider({"offers": [offer]}).offers(Need()) == [
        Offer(provider="course", type="g4dn.xlarge", price_usd_per_hour=0.5)
    ]


def test_a_time_in_another_year_shows_the_year() -> None:
    zone = ZoneInfo("Europe/Berlin")
    new_year = datetime(2029, 12, 31, 23, 30, tzinfo=UTC).timestamp()
    assert short_time_text(new_year, zone, new_year + 86_400) == "01 Jan 00:30"
    assert short_time_text(new_year, zone, new_year - 86_400) == "01 Jan 2030 00:30"

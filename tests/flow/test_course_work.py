"""What the keeper does for a seat: a server only with an end at its provider, keys, more time."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from course_keeper_context import KEY, OFFER, Course, TimedCloud, create, patched_course
from lab_world import DiskCloud, Recorded, unreachable, world

from labctl.courses import broadcast
from labctl.courses.claims import SharedSeatServer
from labctl.courses.preflight import check_course
from labctl.courses.requests import RequestHandler
from labctl.courses.seat_claims import SeatClaim
from labctl.courses.seat_operations import CachingCourseOperator, SeatOperations
from labctl.courses.servers import bring_up_servers
from labctl.courses.teardown import end_seats
from labctl.errors import DeniedError, LabError, PolicyError, ProviderError
from labctl.lifecycle import extend as more_time
from labctl.servers.deadlines import MARGIN_S
from labctl.state import State
from labctl.wire.watchdog import WatchRecord

BUDGET = "per_student: {budget: 2.00, ttl: 2h, max_ttl: 4h}\n"


def made(tmp_path: Path, patch: pytest.MonkeyPatch, kind: type[DiskCloud]) -> Course:
    lab = world(tmp_path, kind)
    lab.cloud.price, lab.cloud.settle_s = 1.0, 0.0
    return patched_course(lab, tmp_path / "ml", patch, BUDGET)


class TimedDisks(TimedCloud, DiskCloud):
    denies = False

    def set_deadline(self, server_id: str, at: float) -> None:
        if self.denies:
            raise DeniedError("the account may not set timers")
        super().set_deadline(server_id, at)


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    return made(tmp_path, monkeypatch, TimedDisks)


def work_of(course: Course) -> SeatOperations:
    state = State(course.world.places.database)
    places = course.world.places
    return SeatOperations(
        CachingCourseOperator(course.folder, places, state, Recorded(), by="keeper")
    )


def claim(student: str, key: str = KEY) -> SeatClaim:
    return SeatClaim(
        token="aa" * 8,
        student=student,
        lab="lab",
        lab_id="0f1e2d3c4b5a",
        public_key=key,
        offer=OFFER,
        at=0.0,
    )


def test_a_server_is_made_with_its_end_at_the_provider(course: Course) -> None:
    work, seat = work_of(course), course.folder.find_seat("alice")
    work.check(seat)
    server = work.create_server(seat)
    (deadline,) = course.cloud.deadlines.values()
    assert server.deadline_at == deadline == pytest.approx(time.time() + 7200 + MARGIN_S, abs=60)
    assert [one.kind for one in course.folder.ledger.list_entries(seat="alice")] == ["up"]
    work.save_and_remove_server(seat, server)
    assert course.cloud.machines == {}
    assert course.folder.ledger.list_entries(seat="alice")[-1].kind == "down"


def test_where_the_timer_is_denied_nothing_goes_on(course: Course) -> None:
    course.cloud.denies = True
    work, seat = work_of(course), course.folder.find_seat("alice")
    with pytest.raises(ProviderError, match="removed again"):
        work.create_server(seat)
    assert course.cloud.machines == {}
    assert course.folder.ledger.list_entries(seat="alice")[-1].kind == "down"


def test_a_server_that_failed_is_removed_and_its_student_is_told_so(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs any more, and a student cannot type the course's commands."""
    monkeypatch.setattr("labctl.lifecycle.up.prepare", Mock(side_effect=LabError("no Docker")))
    work, seat = work_of(course), course.folder.find_seat("alice")
    with pytest.raises(ProviderError, match="no Docker") as failed:
        work.create_server(seat)
    assert course.cloud.machines == {}
    assert failed.value.why == "the server was removed again"
    assert failed.value.hint.startswith("labctl up ")
    (outcome,) = bring_up_servers(work.staff, [seat])
    assert "is still running" in outcome.why
    assert outcome.why.endswith("until labctl course down --only alice")


def test_a_server_from_before_that_fails_goes_on_and_its_student_is_told_so(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, seat = work_of(course), course.folder.find_seat("alice")
    server = work.create_server(seat)
    monkeypatch.setattr("labctl.lifecycle.up.prepare", Mock(side_effect=LabError("no Docker")))
    with pytest.raises(ProviderError, match="no Docker") as failed:
        work.create_server(seat)
    assert list(course.cloud.machines) == [server.id]
    assert failed.value.why == (
        f"{server.id} is still running (last known), at $1.00/h until labctl down"
    )


def test_where_no_timer_can_be_set_none_is_made_and_the_class_day_check_says_so(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course.cloud, "missing_deadline_setup", "its role is not set")
    work, seat = work_of(course), course.folder.find_seat("alice")
    with pytest.raises(PolicyError, match="servers of their own") as refused:
        work.check(seat)
    assert "its role is not set" in refused.value.why
    assert "labctl course check" in refused.value.hint
    (found,) = [one for one in check_course(work.staff, [seat]) if one.name == "end of servers"]
    assert not found.ok
    assert "its role is not set" in found.detail
    assert found.next
    monkeypatch.setattr(course.cloud, "missing_deadline_setup", "")
    work.check(seat)
    (found,) = [one for one in check_course(work.staff, [seat]) if one.name == "end of servers"]
    assert found.ok


def test_a_provider_without_a_timer_gives_no_server_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = made(tmp_path, monkeypatch, DiskCloud)
    work, seat = work_of(course), course.folder.find_seat("alice")
    with pytest.raises(PolicyError, match="servers of their own"):
        work.check(seat)
    course.cloud.price = 0.0
    work_of(course).check(seat)


def test_a_used_up_budget_makes_nothing(course: Course) -> None:
    work, seat = work_of(course), course.folder.find_seat("alice")
    now = time.time()
    course.folder.ledger.append("up", seat="alice", server_id="old", usd_per_hour=1.0)
    detail = {"server_id": "old", "from": now - 7300, "until": now - 100, "usd": 2.0}
    course.folder.ledger.append("cost", seat="alice", **detail)
    course.folder.ledger.append("down", seat="alice", server_id="old")
    with pytest.raises(PolicyError, match="used up"):
        work.check(seat)
    course.folder.ledger.append("budget", seat="alice", usd=5.0)
    work.check(seat)
    work.check(course.folder.find_seat("bob"))  # another seat's dollars are its own


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"ends_by": "idle", "ends_in_s": 21.0}, "nothing ran there; "),
        ({"ends_by": "idle", "ends_in_s": 600.0}, ""),
        ({"ending": "ttl", "ends_by": "idle"}, "its time was over; "),
    ],
)
def test_a_student_learns_why_the_server_is_stopped(
    course: Course, report: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, seat = work_of(course), course.folder.find_seat("alice")
    server = work.create_server(seat)
    work.staff.state.record(
        "watch", lab_id=seat.lab_id, server_id=server.id, detail={"watch": report}
    )
    assert work.explain_stop(seat) is None
    course.world.cloud.change(server.id, state="stopped")
    now = time.time()
    monkeypatch.setattr("labctl.courses.seat_ends.time.time", lambda: now + 60.0)
    ended = work.explain_stop(seat)
    assert ended is not None
    assert ended.why == f"{why}it is stopped, and labctl up starts it again"


def test_keys_are_those_of_who_holds_it_now(course: Course) -> None:
    work, seat = work_of(course), course.folder.find_seat("bob")
    server = work.create_server(seat)
    file = course.world.machine.home / ".ssh" / "authorized_keys"
    file.parent.mkdir(exist_ok=True)
    file.write_text("ssh-ed25519 KEEPER labctl")  # no newline at its end
    other = KEY[:-4] + "BBBB"
    work.authorize_keys(seat, server, (claim("bob"), claim("carol", f"{other} carol@laptop")))
    lines = file.read_text().splitlines()
    assert lines[0] == "ssh-ed25519 KEEPER labctl"
    assert sorted(lines[1:]) == sorted(f"{one} labctl-student" for one in (KEY, other))
    work.authorize_keys(seat, server, (claim("carol", other),))
    assert file.read_text().splitlines() == [lines[0], f"{other} labctl-student"]
    assert file.stat().st_mode & 0o777 == 0o600


class Killed(BaseException):
    """The keeper's process ends here."""


@pytest.mark.parametrize("point", ["create", "created", "deadline", "let in", "kept"])
def test_a_keeper_that_ends_while_it_makes_a_server_goes_on_with_that_one(
    point: str, course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server, with its end at the provider, for the student who asked: never two."""

    def killed(*_: object, **__: object) -> None:
        raise Killed

    work, cloud = work_of(course), course.cloud
    request_handler = RequestHandler(course.folder, work)
    request_handler._begin = lambda action: action()
    with monkeypatch.context() as patch:
        if point == "create":
            patch.setattr(cloud, "at_create", killed)
        elif point == "created":
            made = type(cloud).create
            patch.setattr(cloud, "create", lambda *args: killed(made(cloud, *args)))
        elif point == "deadline":
            patch.setattr(cloud, "set_deadline", killed)
        elif point == "let in":
            patch.setattr(SeatOperations, "_write_keys", killed)
        else:
            patch.setattr(SharedSeatServer, "_record_server", killed)
        with pytest.raises(Killed):
            create(request_handler, "alice")
    request_handler = RequestHandler(course.folder, work_of(course))
    request_handler._begin = lambda action: action()
    for seat in request_handler.list_seat_servers():
        seat.resume()
    (server,) = request_handler.get_seat_server(course.folder.find_seat("alice")).list_views(
        "alice"
    )
    assert (server.state, len(cloud.machines)) == ("running", 1)
    assert list(cloud.deadlines) == list(cloud.machines)
    assert "labctl-student" in (course.world.machine.home / ".ssh/authorized_keys").read_text()


def test_a_server_that_lets_nobody_in_does_not_go_on_unclaimed(course: Course) -> None:
    """One that was there before is left as it is."""
    work, seat = work_of(course), course.folder.find_seat("alice")
    server = work.create_server(seat)
    course.world.machine.error = unreachable()
    with pytest.raises(LabError):
        work.authorize_keys(seat, server, (claim("alice"),))
    assert course.cloud.machines == {}
    course.world.machine.error = None
    server = work.create_server(seat)
    work.authorize_keys(seat, server, (claim("alice"),))
    course.world.machine.error = unreachable()
    with pytest.raises(LabError):
        work.authorize_keys(seat, server, (claim("alice"),))
    assert list(course.cloud.machines) == [server.id]


def test_more_time_ends_at_the_ceiling_however_it_is_asked_for(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(more_time, "extend", lambda context, span_s, **_: asked.append(span_s))
    work, seat = work_of(course), course.folder.find_seat("alice")
    server = work.create_server(seat)
    work.extend(seat, server, 3600, "alice")
    work.extend(seat, server, 3600, "alice")
    with pytest.raises(PolicyError, match="cannot extend by"):
        work.extend(seat, server, 60, "alice")
    assert asked == [3600, 3600]
    # What staff gives on top moves the ceiling; a new server begins anew.
    course.folder.ledger.append("extend", seat="alice", by="staff", seconds=3600)
    with pytest.raises(PolicyError):
        work.extend(seat, server, 3600 + 60, "alice")
    end_seats(work.staff, [seat])
    work.extend(seat, work.create_server(seat), 7200, "alice")


def test_a_forged_watchdog_moves_no_end_at_the_provider(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its student is root there: what the server says of its clocks is their own word."""
    work, seat = work_of(course), course.folder.find_seat("alice")
    server = work.create_server(seat)
    deadlines = course.cloud.deadlines
    for said in (1e12, float("inf"), float("nan"), None):
        forged = WatchRecord(ttl_left_s=said)
        monkeypatch.setattr(more_time.guard, "extend", lambda *_, forged=forged: forged)
        work.extend(seat, server, 60, "alice")
        assert deadlines[server.id] <= server.created_at + 2 * 3600 + 6 * 60 + MARGIN_S + 1
    staffs = WatchRecord(ttl_left_s=1e12)
    monkeypatch.setattr(more_time.guard, "extend", lambda *_: staffs)
    monkeypatch.setattr(broadcast.guard, "arm", lambda *_, **__: None)
    broadcast.extend_server(work.staff, seat, 3600)
    assert deadlines[server.id] <= server.created_at + 4 * 3600 + 3600 + MARGIN_S + 1


def test_two_who_ask_at_once_get_no_more_than_one_after_the_other(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what was refused count, nor what a keeper did not live to answer go uncounted."""
    work, seat = work_of(course), course.folder.find_seat("alice")
    server = work.create_server(seat)
    met = threading.Barrier(4)

    def slowly(context: object, span_s: int, **_: object) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(0.3)

    monkeypatch.setattr(more_time, "extend", slowly)
    given: list[bool] = []

    def ask() -> None:
        try:
            work.extend(seat, server, 3600, "alice")
        except PolicyError:
            given.append(False)
        else:
            given.append(True)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(given) == [False, False, True, True]
    end_seats(work.staff, [seat])
    server = work.create_server(seat)

    def refused(*_: object, **__: object) -> None:
        raise PolicyError("beyond the budget")

    monkeypatch.setattr(more_time, "extend", refused)
    for _ in range(3):
        with pytest.raises(PolicyError, match="budget"):
            work.extend(seat, server, 7200, "alice")

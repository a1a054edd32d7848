"""Budgets and plans of a class that has servers: what is written down is also in force."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from course_context import Class, a_class, roster

from labctl.courses.allowances import change_budget, extend_due_time
from labctl.courses.context import build_own_seat
from labctl.courses.costs import compute_costs, format_csv
from labctl.courses.metering import HOME, hold_end_locks, record_costs, record_ends
from labctl.courses.plan import compute_plan, store_plan_snapshot
from labctl.courses.servers import bring_up_servers
from labctl.courses.teardown import end_seats
from labctl.errors import NoOfferError

NAMES = ("alice", "bob", "carol")
HOURS = """
hours: [{days: [mon], from: "10:00", to: "12:00", zone: UTC, prewarm: 30m}]
term: {from: 2026-01-01, to: 2099-01-31}
assignments: {hw3: {due: "2098-11-28 23:59 UTC", late: 48h}}
"""


@pytest.fixture
def ml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Class:
    return a_class(tmp_path, monkeypatch, roster(NAMES), HOURS)


def aged(one: Class, hours: float) -> None:
    """The class's servers are so much older than they were."""
    for server_id in list(one.cloud.machines):
        made_at = one.cloud.machines[server_id].created_at - hours * 3600
        one.cloud.change(server_id, created_at=made_at)


def test_more_budget_reaches_the_server_that_runs(ml: Class, guarded: list[float | None]) -> None:
    bring_up_servers(ml.staff(), [ml.seat("bob")])
    changed = change_budget(ml.staff(), ml.seat("bob"), "+5", "a longer project")
    assert (changed.before_usd, changed.after_usd, changed.in_force) == (20.0, 25.0, True)
    assert guarded[-1] == pytest.approx(25.0, abs=0.01)
    (line,) = ml.folder.ledger.list_entries(kind="budget")
    assert (line.seat, line.by, line.why) == ("bob", "ta", "a longer project")
    same = change_budget(ml.staff(), ml.seat("bob"), "25")
    assert same.after_usd == 25.0
    assert len(ml.folder.ledger.list_entries(kind="budget")) == 1


def test_costs_ask_the_provider_and_write_down_what_it_shows(ml: Class) -> None:
    bring_up_servers(ml.staff(), ml.folder.list_seats())
    aged(ml, 10)
    ml.folder.ledger.path.unlink()
    found = compute_costs(ml.staff(), refresh=True)
    assert found.complete
    assert found.usd == pytest.approx(3 * 5.0, abs=0.1)
    assert {one.kind for one in ml.staff().folder.ledger.list_entries()} == {"up", "cost"}
    again = compute_costs(ml.staff())
    assert again.usd == pytest.approx(found.usd, abs=0.01)
    assert [line.split(",")[0] for line in format_csv(again).splitlines()] == ["student", *NAMES]


def test_a_plan_counts_what_is_there_prices_the_rest_and_holds_it_to_the_quota(ml: Class) -> None:
    bring_up_servers(ml.staff(), [ml.seat("alice")])
    found = compute_plan(ml.staff())
    assert (found.running, found.to_make) == (("alice",), ("bob", "carol"))
    assert found.usd_per_hour == pytest.approx(1.5)
    # Eight hours of three servers at half a dollar; two and a half of class each week.
    assert found.once_at_most_usd == pytest.approx(12.0, abs=0.1)
    assert found.usd_per_week == pytest.approx(3.75)
    assert [one.enough for one in found.quotas] == [True]
    ml.cloud.most = 2
    (short,) = compute_plan(ml.staff()).quotas
    assert not short.enough
    assert "3 servers" in short.request


def test_a_plan_tells_who_went_into_a_team_and_that_their_server_is_to_end(ml: Class) -> None:
    bring_up_servers(ml.staff(), [ml.seat("alice")])
    store_plan_snapshot(ml.staff())
    file = ml.folder.roster_file
    file.write_text(file.read_text().replace("alice,Alice,,,", "alice,Alice,,t1,"))
    found = compute_plan(ml.staff(), offline=True)
    assert (found.to_end, found.new_seats, found.gone_seats) == (("alice",), ("t1",), ("alice",))
    staff = ml.staff()
    (ended,) = end_seats(staff, staff.folder.list_seats(active_only=False, former=True))
    assert (ended.seat, ended.ended) == ("alice", True)
    assert not ml.cloud.machines
    assert compute_plan(ml.staff(), offline=True).to_end == ()


def test_a_plan_without_an_offer_says_why_and_shows_the_rest(
    ml: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(need: object) -> None:
        raise NoOfferError("nothing fits", why="no T4 anywhere", hint="ask for less")

    monkeypatch.setattr(ml.cloud, "offers", none)
    found = compute_plan(ml.staff())
    assert (found.problem, found.problem_next) == ("nothing fits: no T4 anywhere", "ask for less")
    assert len(found.to_make) == 3


def test_a_due_time_reaches_the_receiver_once_it_knows_the_assignment(ml: Class) -> None:
    from labctl.courses.allowances import apply_extensions
    from labctl.submissions.receive import write_assignment
    from labctl.submissions.receiver import Receiver

    extend_due_time(ml.folder, "hw3", "bob", "+3d", by="ta")
    receiver = Receiver(ml.folder.drop)
    receiver.init()
    rules = {"due": "2098-11-28 23:59 UTC", "late": "48h"}
    write_assignment(receiver, "hw3", "s3://bucket/ml", rules)
    assert receiver.extensions("hw3") == {}
    apply_extensions(ml.folder, "hw3")
    assert receiver.extensions("hw3") == {"bob": 3 * 86_400}
    extend_due_time(ml.folder, "hw3", "bob", "0", by="ta")
    assert receiver.extensions("hw3") == {}


def test_a_plan_of_shared_servers_prices_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = a_class(tmp_path, monkeypatch, roster(NAMES), "shared: {accounts_per_server: 2}\n")
    found = compute_plan(shared.staff())
    assert (found.servers, found.accounts_per_server, found.seats) == (2, 2, 3)
    assert found.offer is not None
    assert found.offer.price_usd_per_hour == 0.5
    assert found.usd_per_hour == pytest.approx(1.0)
    assert found.once_at_most_usd == pytest.approx(8.0)


def test_a_server_of_the_courses_own_costs_too_and_is_nobodys(ml: Class) -> None:
    bring_up_servers(ml.staff(), [ml.seat("alice")])
    aged(ml, 2)
    ml.folder.ledger.path.unlink()
    of_alice = ml.server("alice")
    own = build_own_seat(ml.folder, "check").lab_id
    bare = msgspec.structs.replace(of_alice, id="i-own", lab="ml-check", lab_id=own)
    record_costs(ml.folder, ml.staff().course(), [of_alice, bare])
    found = {one.seat: one for one in compute_costs(ml.staff()).seats}
    assert found[".check"].usd == pytest.approx(1.0, abs=0.01)
    assert found[".check"].budget_usd is None
    assert sum(one.usd for one in found.values()) == pytest.approx(2.0, abs=0.02)
    assert compute_plan(ml.staff(), offline=True).to_end == ()


@pytest.fixture
def shown_at_once(ml: Class, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that the provider does not show is gone, however young."""
    monkeypatch.setattr("labctl.courses.metering.YOUNG_S", 0.0)
    ml.cloud.settle_s = 0.0


@pytest.mark.usefixtures("shown_at_once")
def test_an_end_that_somebody_is_about_to_write_down_is_not_unseen(ml: Class) -> None:
    bring_up_servers(ml.staff(), [ml.seat("alice")])
    aged(ml, 2)
    course, seat = ml.staff().course(), ml.seat("alice")
    ending = msgspec.structs.replace(ml.server("alice"), state="ending")
    with hold_end_locks(ml.state, [seat]), hold_end_locks(ml.state, [seat]):
        record_costs(ml.folder, course, [ending])
        record_costs(ml.folder, course, [])
        assert not ml.folder.ledger.list_entries(kind="down")
        record_ends(
            ml.folder, [(seat, ml.server("alice"))], "keeper", "its budget is used up", HOME
        )
    record_costs(ml.folder, course, [])
    (end,) = ml.folder.ledger.list_entries(kind="down")
    assert (end.why, end.detail["saved"]) == ("its budget is used up", HOME)


def test_two_who_end_a_class_do_not_wait_for_each_of_its_seats(ml: Class) -> None:
    seats = ml.folder.build_seats({f"s{number}": () for number in range(300)})
    with hold_end_locks(ml.state, seats):
        begun = time.monotonic()
        with hold_end_locks(ml.state, seats):
            assert time.monotonic() - begun < 30.0  # a fifth of a second for each is a minute


@pytest.mark.usefixtures("shown_at_once")
def test_an_end_that_nobody_writes_down_is_unseen(ml: Class) -> None:
    bring_up_servers(ml.staff(), [ml.seat("alice")])
    aged(ml, 2)
    with hold_end_locks(ml.state, [ml.seat("alice")]):
        pass  # it failed
    record_costs(ml.folder, ml.staff().course(), [])
    (end,) = ml.folder.ledger.list_entries(kind="down")
    assert end.detail["unseen"] is True
    assert end.why.startswith("ended unseen")  # by which an earlier labctl knows it

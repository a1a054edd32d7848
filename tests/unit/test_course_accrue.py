"""What a snapshot of a provider adds to a course's ledger."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.courses.context import sum_staff_extensions_s
from labctl.courses.metering import ServerSnapshot, draft_lines
from labctl.courses.records.folder import Seat
from labctl.courses.records.ledger_entries import (
    CourseLedgerDraft,
    CourseLedgerEntry,
    merge_cost_entries,
)
from labctl.courses.records.ledger_servers import read_servers
from labctl.courses.records.spending import spent_usd
from labctl.model import Endpoint, Offer, Server, ServerState

SEAT = Seat(name="alice", lab="ml-0a1b2c3d", lab_id="0123456789ab", students=("alice",))
HOUR = 3600.0


def server(
    server_id: str = "i-1", at: float = 0.0, price: float = 2.0, state: ServerState = "running"
) -> Server:
    return Server(
        id=server_id,
        provider="cloud",
        lab=SEAT.lab,
        lab_id=SEAT.lab_id,
        alias=SEAT.lab,
        endpoint=Endpoint(host="192.0.2.1"),
        offer=Offer(provider="cloud", type="small", price_usd_per_hour=price),
        created_at=at,
        state=state,
    )


def written(
    drafts: Sequence[CourseLedgerDraft], at: float, before: Sequence[CourseLedgerEntry] = ()
) -> list[CourseLedgerEntry]:
    fresh = [
        CourseLedgerEntry(n=len(before) + n, at=at, kind=one.kind, seat=one.seat, detail=one.detail)
        for n, one in enumerate(drafts, 1)
    ]
    return [*before, *fresh]


def looked(
    entries: Sequence[CourseLedgerEntry], at: float, *servers: Server, **more: object
) -> list[CourseLedgerEntry]:
    snapshot = ServerSnapshot(at=at, servers=servers, idle_s=more.get("idle_s", {}))  # type: ignore[arg-type]
    return written(draft_lines(entries, [SEAT], snapshot), at, entries)


def kinds(entries: Sequence[CourseLedgerEntry]) -> list[str]:
    return [one.kind for one in entries]


def test_a_server_that_no_line_knows_is_priced_from_its_tags() -> None:
    found = looked([], 3 * HOUR, server())
    assert kinds(found) == ["up", "cost"]
    assert found[1].detail["usd"] == pytest.approx(6.0)
    assert spent_usd(found, "alice", 3 * HOUR) == pytest.approx(6.0)


def test_ten_minutes_are_left_for_a_later_look() -> None:
    found = looked([], HOUR, server())
    assert looked(found, HOUR + 599, server()) == found
    assert kinds(looked(found, HOUR + 601, server())) == ["up", "cost", "cost"]


def test_what_ended_unseen_is_paid_for_until_that_was_noticed() -> None:
    found = looked(looked([], HOUR, server()), 2 * HOUR)
    assert kinds(found) == ["up", "cost", "cost", "down"]
    assert spent_usd(found, "alice", 9 * HOUR) == pytest.approx(4.0)
    assert looked(found, 9 * HOUR) == found


def test_one_just_made_may_only_not_be_shown_yet() -> None:
    found = looked([], 70.0, server())
    assert looked(found, 80.0) == found


def test_an_ended_one_that_shows_itself_again_goes_on() -> None:
    gone = looked(looked([], HOUR, server()), 2 * HOUR)
    found = looked(gone, 3 * HOUR, server())
    assert kinds(found)[-2:] == ["up", "cost"]
    assert spent_usd(found, "alice", 3 * HOUR) == pytest.approx(6.0)


def test_a_stopped_one_costs_nothing_and_starts_where_it_starts() -> None:
    found = looked([], HOUR, server())
    found = looked(found, 5 * HOUR, server(state="stopped"))
    found = looked(found, 6 * HOUR, server())
    assert spent_usd(found, "alice", 6 * HOUR) == pytest.approx(4.0)


def test_idle_time_is_the_part_that_is_new() -> None:
    found = looked([], HOUR, server(), idle_s={"i-1": 600.0})
    found = looked(found, 2 * HOUR, server(), idle_s={"i-1": 900.0})
    costs = [one.detail["idle_s"] for one in found if one.kind == "cost"]
    assert costs == [600.0, 300.0]


def test_other_peoples_servers_are_nobodys_cost() -> None:
    other = msgspec.structs.replace(server(), lab_id="ffffffffffff")
    assert looked([], HOUR, other) == []


@given(st.lists(st.floats(min_value=1.0, max_value=4 * HOUR), min_size=1, max_size=30))
def test_however_often_it_is_looked_at_the_sum_is_the_same(pauses: list[float]) -> None:
    entries: list[CourseLedgerEntry] = []
    at = 0.0
    for pause in pauses:
        at += pause
        entries = looked(entries, at, server())
    assert spent_usd(entries, "alice", at) == pytest.approx(at / HOUR * 2.0)


def test_what_staff_gave_counts_for_the_present_server_alone() -> None:
    def entry(n: int, kind: str, seconds: int = 0, student: str = "") -> CourseLedgerEntry:
        return CourseLedgerEntry(
            n=n, at=float(n), kind=kind, student=student, detail={"seconds": seconds}
        )

    before = [entry(1, "up"), entry(2, "extend", 7200), entry(3, "up")]
    assert sum_staff_extensions_s(before) == 0
    assert sum_staff_extensions_s([*before, entry(4, "extend", 3600)]) == 3600
    taken = entry(5, "extend", 900, student="alice")
    assert sum_staff_extensions_s([*before, entry(4, "extend", 3600), taken]) == 3600


def seen_in(
    account: str, *entries: CourseLedgerEntry, confirmed: Sequence[str] = ()
) -> list[CourseLedgerEntry]:
    """A snapshot with the credentials of an account, which shows nothing."""
    snapshot = ServerSnapshot(
        at=2 * HOUR, servers=(), account=account, confirmed=frozenset(confirmed)
    )
    return written(draft_lines(entries, [SEAT], snapshot), 2 * HOUR, entries)


def test_a_server_ends_unseen_only_in_its_own_account() -> None:
    entries = looked([], HOUR, msgspec.structs.replace(server(), account="111"))
    assert kinds(seen_in("222", *entries)) == kinds(entries)
    assert kinds(seen_in("111", *entries))[-1] == "down"


def test_a_server_without_an_account_ends_once_its_provider_says_so() -> None:
    entries = looked([], HOUR, server())
    assert kinds(seen_in("111", *entries)) == kinds(entries)
    assert kinds(seen_in("111", *entries, confirmed=["i-1"]))[-1] == "down"
    assert kinds(seen_in("", *entries))[-1] == "down"  # its provider has no accounts


def test_a_server_without_an_account_gets_it_at_the_next_look() -> None:
    entries = looked([], HOUR, server())
    entries = looked(entries, HOUR + 1, msgspec.structs.replace(server(), account="111"))
    assert read_servers(entries)["i-1"].account == "111"
    both = merge_cost_entries(*(one for one in entries if one.kind == "cost"))
    assert both is not None
    assert read_servers([entries[0], both])["i-1"].account == "111"

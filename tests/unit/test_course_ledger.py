"""The ledger: nothing that was said to be written is lost, and nothing resets a budget."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.courses.records.ledger import TAIL_BYTES, Ledger
from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.courses.records.spending import (
    RunningServer,
    allowance_usd,
    compute_spending,
    list_spans,
    read_due_extensions,
    spent_usd,
)
from labctl.errors import LabError

HOUR = 3600.0
MANY = """
import sys
from pathlib import Path
from labctl.courses.records.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
for number in range(25):
    ledger.append("cost", seat=sys.argv[2], number=number)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "course" / "ledger.jsonl"


def test_lines_are_numbered_and_come_back_by_seat_and_kind(path: Path) -> None:
    ledger = Ledger(path, now=lambda: 7.5)
    ledger.append("up", seat="ada", by="staff", why="class", server_id="i-1")
    ledger.append_all(
        [
            CourseLedgerDraft(kind="cost", seat="bob"),
            CourseLedgerDraft(kind="down", seat="ada", at=9.0),
        ]
    )
    assert [(one.n, one.at, one.kind, one.seat) for one in ledger.list_entries()] == [
        (1, 7.5, "up", "ada"),
        (2, 7.5, "cost", "bob"),
        (3, 9.0, "down", "ada"),
    ]
    assert [one.n for one in Ledger(path).list_entries(seat="ada", kind="down")] == [3]
    assert ledger.list_entries()[0].detail == {"server_id": "i-1"}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_kind_that_nobody_reads_is_a_mistake(path: Path) -> None:
    with pytest.raises(ValueError, match="not a kind"):
        Ledger(path).append("upp")


def test_costs_that_follow_one_another_are_given_as_one_and_sum_to_the_same(path: Path) -> None:
    ledger = Ledger(path, now=lambda: 50 * HOUR)
    ledger.append_all([draft(up(0))])
    for hour in range(48):
        idle_s = HOUR if 10 <= hour < 20 else 0.0
        ledger.append_all([draft(cost(hour * HOUR, (hour + 1) * HOUR, 0.5, idle_s))])
        assert spent_usd(ledger.list_entries(), "ada", (hour + 1) * HOUR) == pytest.approx(
            0.5 * (hour + 1)
        )
    told = [one for one in Ledger(path).list_entries() if one.kind == "cost"]
    edges = [(one.detail["from"] / HOUR, one.detail["until"] / HOUR) for one in told]
    assert edges == [(0, 10), (10, 20), (20, 48)]
    assert [one.detail["idle_s"] for one in told] == [0, 10 * HOUR, 0]
    assert ledger.append("down", seat="ada", server_id="i-1").n == 50
    assert compute_spending(ledger.list_entries(), 99 * HOUR) == compute_spending(
        Ledger(path).list_entries(), 99 * HOUR
    )


def test_costs_with_a_gap_or_at_another_price_stay_apart(path: Path) -> None:
    ledger = Ledger(path)
    costs = [cost(0, HOUR, 1.0), cost(2 * HOUR, 3 * HOUR, 1.0), cost(3 * HOUR, 4 * HOUR, 2.0)]
    ledger.append_all([draft(one) for one in [*costs, cost(4 * HOUR, 5 * HOUR, 2.0, server="i-2")]])
    assert len(ledger.list_entries()) == 4


def test_one_reader_sees_what_another_process_appends(path: Path) -> None:
    reader, writer = Ledger(path), Ledger(path)
    assert reader.list_entries() == []
    writer.append("joined", student="ada")
    assert len(reader.list_entries()) == 1
    writer.append("joined", student="bob")
    assert [one.student for one in reader.list_entries()] == ["ada", "bob"]


def test_processes_that_append_at_once_lose_nothing_and_share_no_number(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", MANY, str(path), name]) for name in ("a", "b", "c")
    ]
    assert [one.wait(120) for one in writers] == [0, 0, 0]
    entries = Ledger(path).list_entries()
    assert [one.n for one in entries] == list(range(1, 76))
    for name in ("a", "b", "c"):
        own = [one.detail["number"] for one in entries if one.seat == name]
        assert own == list(range(25))


def test_torn_at_any_byte_the_rest_stays_and_the_end_is_put_aside_and_said(path: Path) -> None:
    Ledger(path).append("up", seat="ada")
    first = path.read_bytes()
    Ledger(path).append("cost", seat="ada", usd=1.25)
    whole = path.read_bytes()
    for cut in range(len(first), len(whole)):
        path.write_bytes(whole[:cut])
        said: list[str] = []
        ledger = Ledger(path, notify=said.append)
        before = [one.kind for one in ledger.list_entries()]
        made = ledger.append("down", seat="ada")
        kinds = [one.kind for one in Ledger(path).list_entries()]
        numbers = [one.n for one in Ledger(path).list_entries()]
        assert numbers == list(range(1, made.n + 1))
        if cut == len(first):
            assert (kinds, said) == (["up", "down"], [])
        elif cut == len(whole) - 1:
            # Only its line's end was missing: it counts.
            assert kinds == ["up", "cost", "down"]
        else:
            assert before == ["up"]
            assert kinds == ["up", "torn", "down"]
            kept = path.with_name(f"{path.name}.torn-2").read_bytes()
            assert kept == whole[len(first) : cut] + b"\n"
            assert any("incomplete" in one for one in said)
            path.with_name(f"{path.name}.torn-2").unlink()


def test_a_line_longer_than_what_is_looked_at_keeps_the_count(path: Path) -> None:
    ledger = Ledger(path)
    ledger.append("joined", student="ada")
    ledger.append("roster", added=[f"student-{n:05}" for n in range(20_000)])
    assert path.stat().st_size > 4 * TAIL_BYTES
    assert Ledger(path).append("left", student="ada").n == 3
    path.write_bytes(path.read_bytes()[:-300_000])
    again = Ledger(path)
    again.append("left", student="bob")
    assert [(one.n, one.kind) for one in again.list_entries()] == [
        (1, "joined"),
        (2, "torn"),
        (3, "left"),
    ]


def test_a_line_in_the_middle_that_cannot_be_read_is_told_and_stops_nothing(path: Path) -> None:
    ledger = Ledger(path)
    ledger.append("up", seat="ada")
    with path.open("ab") as file:
        file.write(b"{garbage\n")
    said: list[str] = []
    again = Ledger(path, notify=said.append)
    again.append("down", seat="ada")
    assert [(one.n, one.kind) for one in again.list_entries()] == [(1, "up"), (2, "down")]
    assert len(said) == 1
    assert "after number 1" in said[0]


def test_a_ledger_that_was_replaced_is_read_anew(path: Path) -> None:
    ledger = Ledger(path)
    ledger.append("up", seat="ada")
    assert len(ledger.list_entries()) == 1
    other = Ledger(path.with_name("other.jsonl"))
    other.append("joined", student="bob")
    other.path.replace(path)
    assert [one.kind for one in ledger.list_entries()] == ["joined"]


def test_where_it_cannot_be_written_that_is_an_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LabError, match="cannot write"):
        Ledger(tmp_path / "ledger.jsonl").append("up")
    assert not (tmp_path / "elsewhere").exists()


def up(at: float, server: str = "i-1", seat: str = "ada", price: float = 1.0) -> CourseLedgerEntry:
    detail = {"server_id": server, "usd_per_hour": price, "created_at": at}
    return CourseLedgerEntry(n=1, at=at, kind="up", seat=seat, detail=detail)


def cost(
    since: float, until: float, usd: float, idle_s: float = 0.0, server: str = "i-1"
) -> CourseLedgerEntry:
    detail = {"server_id": server, "from": since, "until": until, "usd": usd, "idle_s": idle_s}
    return CourseLedgerEntry(n=2, at=until, kind="cost", seat="ada", detail=detail)


def down(at: float, server: str = "i-1") -> CourseLedgerEntry:
    return CourseLedgerEntry(n=3, at=at, kind="down", seat="ada", detail={"server_id": server})


def draft(entry: CourseLedgerEntry) -> CourseLedgerDraft:
    return CourseLedgerDraft(kind=entry.kind, seat=entry.seat, detail=entry.detail, at=entry.at)


def alive(
    since: float, price: float = 1.0, server: str = "i-1", stopped: bool = False
) -> RunningServer:
    return RunningServer(
        server_id=server, seat="ada", created_at=since, usd_per_hour=price, stopped=stopped
    )


def test_an_empty_ledger_resets_no_budget_what_lives_is_counted_by_its_tags() -> None:
    assert spent_usd([], "ada", 3 * HOUR, [alive(HOUR, price=2.0)]) == pytest.approx(4.0)
    assert compute_spending([], 3 * HOUR, [alive(HOUR)])["ada"].hours == pytest.approx(2.0)


def test_what_was_written_down_counts_once_and_the_rest_by_the_clock() -> None:
    entries = [up(0), cost(0, HOUR, 1.0)]
    assert spent_usd(entries, "ada", 2 * HOUR, [alive(0)]) == pytest.approx(2.0)
    assert spent_usd(entries, "ada", 2 * HOUR) == pytest.approx(2.0)
    assert spent_usd([*entries, down(HOUR)], "ada", 9 * HOUR) == pytest.approx(1.0)


def test_what_two_machines_wrote_down_for_the_same_time_counts_once() -> None:
    entries = [up(0), cost(0, 2 * HOUR, 2.0), cost(HOUR, 3 * HOUR, 2.0), cost(0, 2 * HOUR, 2.0)]
    assert spent_usd([*entries, down(3 * HOUR)], "ada", 9 * HOUR) == pytest.approx(3.0)


def test_a_hole_in_the_ledger_is_filled_for_a_server_that_lives() -> None:
    entries = [cost(2 * HOUR, 3 * HOUR, 1.0)]
    assert spent_usd(entries, "ada", 4 * HOUR, [alive(0)]) == pytest.approx(4.0)


def test_a_stopped_server_costs_only_what_was_written_down() -> None:
    entries = [up(0), cost(0, HOUR, 1.0)]
    assert spent_usd(entries, "ada", 9 * HOUR, [alive(0, stopped=True)]) == pytest.approx(1.0)


def test_servers_of_one_seat_add_up_and_seats_stay_apart() -> None:
    entries = [up(0), cost(0, HOUR, 1.0), down(HOUR), up(HOUR, "i-2"), up(0, "i-3", "bob", 5.0)]
    totals = compute_spending(entries, 2 * HOUR)
    assert totals["ada"].usd == pytest.approx(2.0)
    assert totals["bob"].usd == pytest.approx(10.0)


def test_idle_time_is_the_part_that_was_told() -> None:
    total = compute_spending([up(0), cost(0, HOUR, 2.0, idle_s=900), down(HOUR)], HOUR)["ada"]
    assert (total.idle_hours, total.idle_usd) == (pytest.approx(0.25), pytest.approx(0.5))


TIMES = st.integers(0, 50)


@given(st.lists(st.tuples(TIMES, TIMES)), TIMES)
def test_no_second_is_counted_twice_whatever_was_written_down(
    pairs: list[tuple[int, int]], now: int
) -> None:
    entries = [up(0), *(cost(a, b, abs(b - a) / HOUR) for a, b in pairs)]
    found = list_spans(entries, float(now), [alive(0)])
    edges = [(one.since, one.until) for one in found]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(edges))
    last = max([now, *(b for a, b in pairs if b > a)])
    assert sum(b - a for a, b in edges) == pytest.approx(last)
    assert sum(one.usd for one in found) == pytest.approx(last / HOUR)


def test_budgets_add_up_and_due_times_do_not() -> None:
    given_more = [
        CourseLedgerEntry(n=1, at=0, kind="budget", seat="ada", detail={"usd": 5.0}),
        CourseLedgerEntry(n=2, at=0, kind="budget", seat="ada", detail={"usd": -2.0}),
        CourseLedgerEntry(n=3, at=0, kind="budget", seat="bob", detail={"usd": 50.0}),
    ]
    assert allowance_usd(given_more, "ada", 20.0) == 23.0
    assert allowance_usd(given_more, "ada", None) is None
    said = [("ada", "hw3", 60), ("ada", "hw3", 90), ("bob", "hw3", 30), ("bob", "hw3", 0)]
    moved = [
        CourseLedgerEntry(
            n=n, at=0, kind="due", student=who, detail={"assignment": name, "seconds": seconds}
        )
        for n, (who, name, seconds) in enumerate([*said, ("ada", "hw4", 5)])
    ]
    assert read_due_extensions(moved, "hw3") == {"ada": 90}

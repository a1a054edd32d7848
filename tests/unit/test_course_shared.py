"""Who sits on which shared server: kept in the course's folder, the same after every restart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labctl.courses import seat_accounts
from labctl.courses.seat_accounts import FILE, SeatAccounts
from labctl.errors import LabError, PolicyError
from labctl.model import CreateServerRequest, Need
from labctl.servers.shared_server import MOST_NAME, account_name


def _request(number: int, token: str = "") -> CreateServerRequest:
    return CreateServerRequest(
        lab=f"ml-{number}",
        lab_id=f"{number:012x}",
        token=token or f"token{number}",
        public_key="ssh-ed25519 AAAA course",
        identity="/keys/id",
        need=Need(),
    )


def test_places_are_filled_one_server_after_the_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        hosts = threads.map(
            lambda n: SeatAccounts(tmp_path).reserve(_request(n), f"s{n}", 4).host, range(10)
        )
    assert sorted(hosts) == [1] * 4 + [2] * 4 + [3] * 2
    assert len({one.account for one in SeatAccounts(tmp_path).list_all()}) == 10


def test_who_asks_again_gets_the_same_and_who_comes_back_the_same_server(tmp_path: Path) -> None:
    seating = SeatAccounts(tmp_path)
    first = [seating.reserve(_request(n), f"s{n}", 2) for n in range(4)]
    assert seating.reserve(_request(3), "s3", 2) == first[3]
    seating.set_state([first[3].token], "gone")
    back = seating.reserve(_request(3, "later"), "s3", 2)
    assert (back.host, back.account) == (first[3].host, first[3].account)
    assert back.server_id != first[3].server_id
    assert seating.find_by_server(first[3].server_id) is None
    seating.set_state([first[0].token], "gone")
    assert seating.reserve(_request(9), "s9", 2).host == 1, "a place that was given up is free"
    assert seating.reserve(_request(0, "late"), "s0", 2).host == 3, "and may be taken"


def test_a_file_that_cannot_be_read_is_never_begun_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"version":1,"sitt')
    with pytest.raises(LabError, match="cannot be read"):
        SeatAccounts(tmp_path).reserve(_request(1), "s1", 4)
    assert (tmp_path / FILE).read_text() == '{"version":1,"sitt'


@pytest.mark.parametrize("name", ["alice", "root", "1", "a" * 39, "a" * 38 + "b", "team-x"])
def test_an_accounts_name_is_one_that_a_system_takes(name: str) -> None:
    made = account_name(name)
    assert made.startswith("lab-")
    assert len(made) <= MOST_NAME
    assert account_name("a" * 39) != account_name("a" * 38 + "b")


def test_two_students_never_get_one_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for two long names whose digests are equal.
    monkeypatch.setattr(seat_accounts, "account_name", lambda name: "lab-same")
    seating = SeatAccounts(tmp_path)
    first = seating.reserve(_request(1), "s1", 4)
    with pytest.raises(PolicyError, match="s2 would get account lab-same"):
        seating.reserve(_request(2), "s2", 4)
    assert seating.reserve(_request(1, "later"), "s1", 4).account == first.account

"""The accounts on shared servers: which lab has which, stored in the course's folder."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from labctl.config.identity import write_private
from labctl.decoding import decode_json
from labctl.errors import CapacityError, LabError, PolicyError
from labctl.model import CreateServerRequest, Value
from labctl.servers.shared_server import account_name
from labctl.state.locks import hold_lock

FILE = "shared.json"
MOST_HOSTS = 999
LOCK_WAIT_S = 60.0


class SharedServerAccount(Value, frozen=True, kw_only=True):
    """An account on a shared server, with its lab and its state.

    `state` is "wanted", "there", "leaving" or "gone". `host` numbers the shared server. `server_id`
    is the account's own id.
    """

    lab: str
    lab_id: str
    account: str
    host: int
    token: str
    key: str
    identity: str
    created_at: float
    state: str = "wanted"

    @property
    def server_id(self) -> str:
        return f"shared{self.host}-{self.token}"


class _Seating(Value, frozen=True):
    version: int = 1
    sittings: tuple[SharedServerAccount, ...] = ()


class SeatAccounts:
    """The stored accounts. Each change reads, changes and writes them under one lock."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def list_all(self) -> tuple[SharedServerAccount, ...]:
        try:
            return decode_json(self._file.read_bytes(), _Seating).sittings
        except FileNotFoundError:
            return ()
        except msgspec.MsgspecError as error:
            raise LabError(
                f"{self._file} cannot be read",
                why=f"it records which lab has which account: {error}",
                hint=f"restore it from a backup of {self._file.parent}",
            ) from error

    def find_by_server(self, server_id: str) -> SharedServerAccount | None:
        return next(
            (account for account in self.list_all() if account.server_id == server_id), None
        )

    def find_by_lab(self, lab_id: str) -> SharedServerAccount | None:
        return next((account for account in self.list_all() if account.lab_id == lab_id), None)

    def _lock(self) -> AbstractContextManager[None]:
        lock = self._file.with_suffix(".lock")
        what = "assigning accounts on a shared server"
        return hold_lock(lock, what, wait_s=LOCK_WAIT_S, is_command=False)

    def reserve(self, request: CreateServerRequest, name: str, places: int) -> SharedServerAccount:
        """Reserve an account for a request; repeating its token returns the same one.

        A lab that had an account before gets the same server again: its files are there.
        """
        with self._lock():
            sittings = self.list_all()
            for account in sittings:
                if account.token == request.token:
                    return account
            before = [account for account in sittings if account.lab_id == request.lab_id]
            others = [account for account in sittings if account.lab_id != request.lab_id]
            chosen_account = account_name(name)
            _require_own_account(chosen_account, name, others)
            host = _choose_host(others, places, first=before[-1].host if before else 1)
            new = SharedServerAccount(
                lab=request.lab,
                lab_id=request.lab_id,
                account=chosen_account,
                host=host,
                token=request.token,
                key=request.public_key,
                identity=request.identity,
                created_at=time.time(),
            )
            self._write((*others, new))
            return new

    def set_state(self, tokens: Iterable[str], state: str) -> None:
        """Set the state of the accounts with these tokens."""
        chosen = set(tokens)
        with self._lock():
            self._write(
                tuple(
                    msgspec.structs.replace(account, state=state)
                    if account.token in chosen
                    else account
                    for account in self.list_all()
                )
            )

    def withdraw(self, sitting: SharedServerAccount, before: SharedServerAccount | None) -> None:
        """Drop an account that was never created; restore `before`, the lab's earlier one."""
        earlier = () if before is None or before.token == sitting.token else (before,)
        with self._lock():
            others = (account for account in self.list_all() if account.token != sitting.token)
            self._write((*others, *earlier))

    def _write(self, sittings: tuple[SharedServerAccount, ...]) -> None:
        write_private(self._file, msgspec.json.encode(_Seating(sittings=sittings)))


def _require_own_account(account: str, name: str, others: Iterable[SharedServerAccount]) -> None:
    """PolicyError if another lab has the account: long names are cut, and end in a digest."""
    for other in others:
        if other.account == account:
            raise PolicyError(
                f"{name} would get account {account}, which {other.lab} has",
                why="the account's name is computed from the name in the roster",
                hint=f"labctl course up   # after you renamed {name} in roster.csv",
            )


def _choose_host(sittings: Iterable[SharedServerAccount], places: int, first: int) -> int:
    """Return `first` if it has a place left, else the lowest number that has.

    Accounts in state "gone" do not count.
    """
    places_used: dict[int, int] = {}
    for account in sittings:
        if account.state != "gone":
            places_used[account.host] = places_used.get(account.host, 0) + 1
    numbers: tuple[int, ...] = (first, *range(1, MOST_HOSTS + 1))
    for number in numbers:
        if places_used.get(number, 0) < places:
            return number
    raise CapacityError(f"a course can have at most {MOST_HOSTS} shared servers")

"""Which account is whose, and on which shared server: a file in the course's folder."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from labctl.config.identity import write_private
from labctl.errors import CapacityError, LabError
from labctl.model import CreateRequest, Value
from labctl.servers.shared_server import account_name
from labctl.state.locks import hold_lock

FILE = "shared.json"
MOST_HOSTS = 999
LOCK_WAIT_S = 60.0


class Sitting(Value, frozen=True, kw_only=True):
    """One account: whose it is, on which server, and how far it has come.

    `state` is "wanted", "there", "leaving" or "gone"; `server_id` is the account's own id.
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
    sittings: tuple[Sitting, ...] = ()


class Seating:
    """Who sits where, on disk. Each change reads, changes and writes under one lock."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def all(self) -> tuple[Sitting, ...]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Seating).sittings
        except FileNotFoundError:
            return ()
        except msgspec.MsgspecError as error:
            raise LabError(
                f"{self._file} cannot be read",
                why=f"it says which account is whose: {error}",
                hint=f"put it back from a backup of {self._file.parent}",
            ) from error

    def of(self, server_id: str) -> Sitting | None:
        return next((one for one in self.all() if one.server_id == server_id), None)

    def of_lab(self, lab_id: str) -> Sitting | None:
        return next((one for one in self.all() if one.lab_id == lab_id), None)

    def seat(self, request: CreateRequest, name: str, places: int) -> Sitting:
        """The place of this request, an earlier one's of the same token or a new one.

        Who sat somewhere before sits there again: their files are there.
        """
        with hold_lock(self._file.with_suffix(".lock"), "seat", wait_s=LOCK_WAIT_S):
            sittings = self.all()
            for one in sittings:
                if one.token == request.token:
                    return one
            before = [one for one in sittings if one.lab_id == request.lab_id]
            others = [one for one in sittings if one.lab_id != request.lab_id]
            host = _room(others, places, first=before[-1].host if before else 1)
            made = Sitting(
                lab=request.lab,
                lab_id=request.lab_id,
                account=account_name(name),
                host=host,
                token=request.token,
                key=request.public_key,
                identity=request.identity,
                created_at=time.time(),
            )
            kept = [one for one in sittings if one.lab_id != request.lab_id]
            self._write((*kept, made))
            return made

    def mark(self, tokens: Iterable[str], state: str) -> None:
        """These are so from now on."""
        chosen = set(tokens)
        with hold_lock(self._file.with_suffix(".lock"), "seat", wait_s=LOCK_WAIT_S):
            self._write(
                tuple(
                    msgspec.structs.replace(one, state=state) if one.token in chosen else one
                    for one in self.all()
                )
            )

    def give_up(self, sitting: Sitting, before: Sitting | None) -> None:
        """Take back a place that nothing was made for; `before` is the lab's earlier one."""
        earlier = () if before is None or before.token == sitting.token else (before,)
        with hold_lock(self._file.with_suffix(".lock"), "seat", wait_s=LOCK_WAIT_S):
            others = (one for one in self.all() if one.token != sitting.token)
            self._write((*others, *earlier))

    def _write(self, sittings: tuple[Sitting, ...]) -> None:
        write_private(self._file, msgspec.json.encode(_Seating(sittings=sittings)))


def _room(sittings: Iterable[Sitting], places: int, first: int) -> int:
    """`first` where it has a place left, else the lowest that has. A place given up is free."""
    taken: dict[int, int] = {}
    for one in sittings:
        if one.state != "gone":
            taken[one.host] = taken.get(one.host, 0) + 1
    numbers: tuple[int, ...] = (first, *range(1, MOST_HOSTS + 1))
    for number in numbers:
        if taken.get(number, 0) < places:
            return number
    raise CapacityError(f"a course has at most {MOST_HOSTS} shared servers")

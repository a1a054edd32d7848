"""What containers that are being made may count on: their name, a place, and GPUs.

The engine's list is the truth, but it lacks what is being made at this moment. Each container to be
made is a claim first. Two are weighed one after the other; the engine is never asked meanwhile.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, NamedTuple

from ..host import engine
from .account_containers import Container, list_containers
from .detection import TAKEN
from .gpu_leases import Busy, Lease, boottime_s, find_free, leases, lend
from .gpu_queue import TURN_S, GpuQueue
from .http import Refusal
from .rules import Account
from .settings import Settings

# Of one account's containers that have ended: each has its log on the server's disk. How a run
# ended is in its own files.
ENDED_KEPT = 64
UNSURE_S = 2 * engine.ANSWER_S  # an engine that gave no answer may make the container even so


class ContainerClaim(NamedTuple):
    """What a container to be made needs beside the account's own files."""

    name: str
    gpus: list[str]
    is_service: bool = False


class Grant(NamedTuple):
    """The UUIDs of its GPUs, and the end of its lease on CLOCK_BOOTTIME."""

    gpus: list[str]
    ends_s: float


@dataclass
class Claim:
    """`finished_s` is on time.monotonic: whatever is listed from then on holds the container."""

    uid: int
    name: str
    leases: list[Lease] = field(default_factory=list)
    finished_s: float = float("inf")


class Claims:
    """`lock` is held while a claim is weighed, and never while the engine is asked."""

    def __init__(
        self, settings: Settings, queue: GpuQueue, read_gpus: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self.lock = threading.Lock()
        self._settings = settings
        self._queue = queue
        self._read_gpus = read_gpus
        self._claims: list[Claim] = []
        self._gpus: list[dict[str, Any]] = []

    @contextmanager
    def claim(self, account: Account, request: ContainerClaim) -> Iterator[Grant]:
        """Make the container inside. Refusal where the account has enough, or others the GPUs."""
        if request.gpus:  # first, since a driver may take long, and the list is to be new
            self._gpus = self._read_gpus() or self._gpus
        began_s = time.monotonic()
        listed = list_containers()
        with self.lock:
            made = self._since(began_s)
            self._require_place(account, request.name, listed, made)
            grant = self._lend(account, request, listed, made)
            claim = Claim(account.uid, request.name)
            claim.leases = [Lease(one, account.uid, "", grant.ends_s) for one in grant.gpus]
            self._claims.append(claim)
        unsure_s = 0.0
        try:
            yield grant
            if grant.gpus:
                with self.lock:
                    self._queue.leave(account.uid)
        except engine.Refused as refused:
            unsure_s = 0.0 if refused.status else UNSURE_S
            raise
        finally:
            claim.finished_s = time.monotonic() + unsure_s

    def names_since(self, began_s: float) -> set[str]:
        """Of containers that a list asked for at `began_s` may lack. The caller holds `lock`."""
        return {one.name for one in self._since(began_s)}

    def keep_queue(self, listed: list[Container], began_s: float) -> None:
        """Let turns for GPUs begin and end, though nobody asks.

        Among the GPUs that the last request found: a driver that hangs must hold up nothing here.
        """
        with self.lock:
            if self._gpus:
                held = _held(listed, self._since(began_s))
                self._queue.keep(find_free(self._gpus, held), boottime_s())

    def _since(self, began_s: float) -> list[Claim]:
        forgotten_s = time.monotonic() - UNSURE_S  # no list takes that long
        self._claims = [one for one in self._claims if one.finished_s > forgotten_s]
        return [one for one in self._claims if one.finished_s >= began_s]

    def _require_place(
        self, account: Account, name: str, listed: list[Container], made: list[Claim]
    ) -> None:
        mine = [one for one in listed if one.uid == account.uid]
        claimed = {one.name for one in made if one.uid == account.uid}
        if any(one.name == name and one.finished_s > time.monotonic() for one in made):
            raise Refusal(409, f'The container name "{name}" is already in use: it is being made')
        live = {one.name or one.id for one in mine if one.is_live} | claimed
        if len(live) >= self._settings.containers:
            most = self._settings.containers
            raise Refusal(409, f"{TAKEN}an account has at most {most} containers here")
        if len(mine) - len(live) >= 2 * ENDED_KEPT:
            raise Refusal(409, f"{TAKEN}too many containers of this account have ended: try again")

    def _lend(
        self,
        account: Account,
        request: ContainerClaim,
        listed: list[Container],
        made: list[Claim],
    ) -> Grant:
        """A service starts without a GPU where others have them all; a run waits for its turn."""
        if not request.gpus:
            return Grant([], 0.0)
        gpus, now_s = self._gpus, boottime_s()
        held = _held(listed, made)
        kept = self._queue.keep(find_free(gpus, held), now_s)
        others = {uuid: one for uuid, one in kept.items() if one.uid != account.uid}
        most, until_s = self._settings.gpus_per_account, now_s + self._settings.gpu_lease_s
        try:
            return Grant(*lend(account, request.gpus, gpus, held, others, most, until_s, now_s))
        except Busy as busy:
            if request.is_service:
                return Grant([], 0.0)
            position = self._queue.join(account.uid, busy.missing)
            raise Refusal(409, f"{busy.message}. {_describe_place(position)}") from None
        except Refusal:
            if not request.is_service:
                raise
            return Grant([], 0.0)


def _held(listed: list[Container], made: list[Claim]) -> list[Lease]:
    return [*leases(listed), *(lease for claim in made for lease in claim.leases)]


def _describe_place(position: int) -> str:
    before = "next" if position == 1 else f"number {position} in the queue"
    return (
        f"This account is {before}. Ask again once a GPU is free for it: "
        f"it is then kept for {TURN_S / 60:.0f} min"
    )

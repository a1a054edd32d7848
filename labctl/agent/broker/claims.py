"""Claims of containers that are being created: their name, a slot, and GPUs.

The engine's list is the truth, but it lacks containers that are being created at this moment. So
each of them is a claim first. Claims are checked one at a time, without requests to the engine.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator, NamedTuple

from ..host import engine
from ..host.paths import read_boottime_s
from .account_containers import AccountContainer, list_containers
from .gpu_leases import GpuIdentity, GpuLease, GpusBusy, find_free, lend_gpus, list_leases
from .gpu_queue import TURN_S, GpuQueue
from .http import HttpRefusal, LimitRefusal
from .rules import BrokerAccount
from .settings import BrokerSettings

# ended containers kept for an account: each has its log on the server's disk. A run's own files
# record how it ended.
ENDED_KEPT = 64
UNSURE_S = 2 * engine.ANSWER_S  # an engine that did not answer may still create the container


class ContainerClaim(NamedTuple):
    """A container to be created, apart from the account's own files.

    With `is_granted` the GPUs are those of its job, so it neither needs a lease nor waits.
    """

    name: str
    gpus: list[str]
    is_service: bool = False
    is_granted: bool = False


class Grant(NamedTuple):
    """The UUIDs of a container's GPUs, and the end of its lease on CLOCK_BOOTTIME."""

    gpus: list[str]
    ends_s: float


@dataclass
class PendingClaim:
    """A claim. Listings that begin after `finished_s` (time.monotonic) contain the container."""

    uid: int
    name: str
    leases: list[GpuLease] = field(default_factory=list)
    finished_s: float = float("inf")


class Claims:
    """All claims.

    `lock` is held while a claim is checked, and never during a request to the engine.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        queue: GpuQueue,
        identify_gpus: Callable[[], list[GpuIdentity]],
    ) -> None:
        self.lock = threading.Lock()
        self._settings = settings
        self._queue = queue
        self._identify_gpus = identify_gpus
        self._claims: list[PendingClaim] = []
        self._gpus: list[GpuIdentity] = []

    @contextmanager
    def claim(self, account: BrokerAccount, request: ContainerClaim) -> Iterator[Grant]:
        """Create the container inside this context.

        Refusal if the account is at a limit, or others have the GPUs.
        """
        if (
            request.gpus and not request.is_granted
        ):  # before the listing: a slow driver must not make that outdated
            self._gpus = self._identify_gpus() or self._gpus
        began_s = time.monotonic()
        listed = list_containers()
        with self.lock:
            claims = self._list_claims(began_s)
            self._require_slot(account, request.name, listed, claims)
            grant = self._lend(account, request, listed, claims)
            claim = PendingClaim(account.uid, request.name)
            leased = [] if request.is_granted else grant.gpus
            claim.leases = [GpuLease(uuid, account.uid, "", grant.ends_s) for uuid in leased]
            self._claims.append(claim)
        unsure_s = 0.0
        try:
            yield grant
            if grant.gpus:
                with self.lock:
                    self._queue.leave(account.uid)
        except engine.EngineRequestError as refused:
            unsure_s = 0.0 if refused.status else UNSURE_S
            raise
        finally:
            claim.finished_s = time.monotonic() + unsure_s

    def list_names_since(self, began_s: float) -> set[str]:
        """Return names of containers that a listing begun at `began_s` may lack.

        Call it with `lock`.
        """
        return {claim.name for claim in self._list_claims(began_s)}

    def advance_queue(self, listed: list[AccountContainer], began_s: float) -> None:
        """Start and end turns for GPUs between requests.

        Uses the GPUs that the last request found, so that a hung driver does not block this.
        """
        with self.lock:
            if self._gpus:
                held = _list_leases(listed, self._list_claims(began_s))
                self._queue.advance(find_free(self._gpus, held), read_boottime_s())

    def _list_claims(self, began_s: float) -> list[PendingClaim]:
        forgotten_s = time.monotonic() - UNSURE_S  # no list takes that long
        self._claims = [claim for claim in self._claims if claim.finished_s > forgotten_s]
        return [claim for claim in self._claims if claim.finished_s >= began_s]

    def _require_slot(
        self,
        account: BrokerAccount,
        name: str,
        listed: list[AccountContainer],
        claims: list[PendingClaim],
    ) -> None:
        own_containers = [entry for entry in listed if entry.uid == account.uid]
        claimed = {entry.name for entry in claims if entry.uid == account.uid}
        if any(entry.name == name and entry.finished_s > time.monotonic() for entry in claims):
            raise HttpRefusal(
                409, f'The container name "{name}" is already in use: it is being created'
            )
        live = {entry.name or entry.id for entry in own_containers if entry.is_live} | claimed
        if len(live) >= self._settings.containers:
            limit = self._settings.containers
            raise LimitRefusal(409, f"an account may have at most {limit} containers")
        if len(own_containers) - len(live) >= 2 * ENDED_KEPT:
            raise LimitRefusal(409, "ended containers of this account are being removed; try again")

    def _lend(
        self,
        account: BrokerAccount,
        request: ContainerClaim,
        listed: list[AccountContainer],
        claims: list[PendingClaim],
    ) -> Grant:
        """Lend GPUs. If all are in use, a service starts without one, and a run joins the queue."""
        if not request.gpus or request.is_granted:
            return Grant(request.gpus, 0.0)
        gpus, now_s = self._gpus, read_boottime_s()
        held_leases = _list_leases(listed, claims)
        reserved = self._queue.advance(find_free(gpus, held_leases), now_s)
        others = {uuid: waiter for uuid, waiter in reserved.items() if waiter.uid != account.uid}
        limit, until_s = self._settings.gpus_per_account, now_s + self._settings.gpu_lease_s
        try:
            return Grant(
                *lend_gpus(account, request.gpus, gpus, held_leases, others, limit, until_s, now_s)
            )
        except GpusBusy as busy:
            if request.is_service:
                return Grant([], 0.0)
            position = self._queue.join(account.uid, busy.missing)
            raise LimitRefusal(409, f"{busy.reason}. {_describe_position(position)}") from None
        except HttpRefusal:
            if not request.is_service:
                raise
            return Grant([], 0.0)


def _list_leases(listed: list[AccountContainer], claims: list[PendingClaim]) -> list[GpuLease]:
    return [*list_leases(listed), *(lease for claim in claims for lease in claim.leases)]


def _describe_position(position: int) -> str:
    place = "next" if position == 1 else f"number {position} in the queue"
    return (
        f"This account is {place}. Try again later: once it is this account's turn, the GPU is "
        f"reserved for {TURN_S / 60:.0f} min"
    )

"""Seats on shared servers: an account each, behind the same contract as a server each.

To everything above, an account is a server: it is made, found, listed and ended like one. The
servers that carry the accounts are labs of the course's own, made when the first account is wanted
and ended with the last. Who sits where is kept in the course's folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
import time

import msgspec

from labctl.courses.records.folder import CourseFolder
from labctl.courses.seat_accounts import Seating, Sitting
from labctl.errors import (
    CapacityError,
    HostKeyError,
    LabError,
    NoOfferError,
    PolicyError,
    QuotaError,
)
from labctl.events import Decision, Event, Note, Reporter, Step
from labctl.lifecycle import up
from labctl.model import (
    Check,
    CreateRequest,
    Endpoint,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.providers import Surroundings
from labctl.servers import accounts, adoption, deadlines, end_server, guard
from labctl.servers.context import Ground
from labctl.servers.shared_server import Account, Sharing, share

# So long one answer of the provider about the servers that carry accounts holds.
LOOK_S = 5.0
# So long is waited for more of those who ask at once: a playbook takes seconds for one, too.
GATHER_S = 0.25
OVER = ("ending", "terminated")
# What a provider answers that has no further server for the course.
NO_OTHER = (CapacityError, NoOfferError, PolicyError, QuotaError)


def through(folder: CourseFolder, course: Ground) -> Ground:
    """The course's ground with accounts in place of servers."""
    made = dataclasses.replace(course)
    made.__dict__.update(
        connections=course.connections, provider=SharedSeats(Hosts(folder, course))
    )
    return made


class _Calm:
    """Hands on what a person should know, and not each task of a playbook."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def emit(self, event: Event) -> None:
        if isinstance(event, Note):
            self._reporter.emit(event)

    def ask(self, decision: Decision) -> bool:
        return self._reporter.ask(decision)


class Hosts:
    """The servers that carry accounts: labs of the course's own."""

    def __init__(self, folder: CourseFolder, course: Ground) -> None:
        self.folder = folder
        self.course = course
        self.seating = Seating(folder.private)
        self._guard = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._ready: dict[int, Server] = {}
        self._shared: set[int] = set()
        self._listed: tuple[float, list[Server]] = (0.0, [])

    @functools.cached_property
    def sharing(self) -> Sharing:
        shared = self.folder.config.shared
        assert shared is not None, "asked for only where the course shares servers"
        return Sharing(
            places=shared.accounts_per_server,
            gpus=shared.gpus,
            gpu_lease_s=shared.gpu_lease,
            disk_bytes=self.folder.config.per_student.disk,
        )

    def ground(self, number: int) -> Ground:
        """The ground of one of them. What its accounts may spend is counted seat by seat."""
        config = self.course.config
        need = msgspec.structs.replace(config.server.need, budget_usd=None)
        own = msgspec.structs.replace(
            config,
            name=f"{self.folder.config.name[:28].rstrip('-')}-shared-{number}",
            root=self.folder.private / "hosts" / str(number),
            server=msgspec.structs.replace(config.server, need=need),
        )
        own.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.course.beside(own, self.lab_id(number))

    def lab_id(self, number: int) -> str:
        text = f"{self.folder.id} shared {number}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def listed(self, *, now: bool = False) -> dict[int, Server]:
        """Those that the provider shows, by number; asked again after LOOK_S."""
        with self._guard:
            at, found = self._listed
            if now or time.monotonic() - at > LOOK_S or not at:
                found = self.course.provider.servers()
                self._listed = (time.monotonic(), found)
        numbers = {one.host for one in self.seating.all()}
        ids = {self.lab_id(number): number for number in numbers}
        return {ids[s.lab_id]: s for s in found if s.lab_id in ids and s.state not in OVER}

    def may_exist(self, number: int) -> bool:
        """Whether the server is there, or may still show up after a lost answer."""
        if self.course.state.open_attempts(self.lab_id(number)):
            return True
        try:
            return number in self.listed(now=True)
        except LabError:
            return True  # nobody knows

    def settle(self, number: int) -> None:
        """Have every account of one server as it is wanted now: those of all who wait at once."""
        with self._lock(number):
            time.sleep(GATHER_S)
            mine = [one for one in self.seating.all() if one.host == number]
            if any(one.state == "wanted" for one in mine):
                # Who asks while the server is made comes along.
                self.server(number)
                mine = [one for one in self.seating.all() if one.host == number]
            coming = [one for one in mine if one.state == "wanted"]
            leaving = [one for one in mine if one.state == "leaving"]
            if not coming and not leaving:
                return  # somebody who waited before has done it
            staying = [one for one in mine if one.state == "there"]
            if coming or staying:
                self._share(number, coming, leaving)
            else:
                self._end(number, leaving)
            self.seating.mark([one.token for one in coming], "there")
            self.seating.mark([one.token for one in leaving], "gone")

    def server(self, number: int) -> Server:
        """One that is ready, made where there is none; with its lock held.

        Another process may have ended the one of before: only the provider knows.
        """
        ready, shown = self._ready.get(number), self.listed(now=True).get(number)
        if ready is None or shown is None or shown.id != ready.id:
            self._shared.discard(number)
            ready = self._ready[number] = up.up(self.ground(number))
            self._listed = (0.0, [])
        return ready

    def _share(self, number: int, coming: list[Sitting], leaving: list[Sitting]) -> None:
        if not coming and not self._is_listed(number):
            return  # it is gone, and they with it
        ground, server = self.ground(number), self.server(number)
        accounts = [Account(name=one.account, keys=(one.key,)) for one in coming]
        accounts += [Account(name=one.account) for one in leaving]
        step = Step(name=f"accounts on {server.alias}", detail=", ".join(a.name for a in accounts))
        ground.reporter.emit(step)
        share(
            server,
            accounts,
            self.sharing,
            playbooks_dir=ground.paths.data_dir / "playbooks",
            ssh_config=ground.connections.config_path(server.id),
            reporter=_Calm(ground.reporter),
            only_accounts=number in self._shared or not coming,
        )
        self._shared.add(number)
        ground.reporter.emit(msgspec.structs.replace(step, done=True))

    def _end(self, number: int, leaving: list[Sitting]) -> None:
        """With its last account a server goes, too; first the accounts, where it is only lent."""
        if self._is_listed(number):
            self._share(number, [], leaving)
            ground = self.ground(number)
            server = adoption.adopt(ground)
            if server is not None:
                end_server.remove(ground, server)
        self._ready.pop(number, None)
        self._shared.discard(number)
        self._listed = (0.0, [])

    def _is_listed(self, number: int) -> bool:
        """Whether the provider shows it now. PolicyError where its answer says nothing of it."""
        if number in self.listed(now=True):
            return True
        known = self.course.state.server_of_lab(self.lab_id(number))
        if known is not None:
            accounts.is_gone(self.course, known)
        return False

    def _lock(self, number: int) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(number, threading.Lock())


class SharedSeats:
    """A Provider whose servers are accounts. What has no account of its own is the inner one's.

    `create` waits until the account is there: all that are asked for meanwhile come with it.
    """

    settings_type = Value
    settle_s = 0.0

    def __init__(self, hosts: Hosts, _around: Surroundings | None = None) -> None:
        self.hosts = hosts
        self.inner = hosts.course.provider
        self.name = self.inner.name

    def get_account(self) -> ProviderAccount:
        return self.inner.get_account()

    def check(self, need: Need | None = None) -> list[Check]:
        return self.inner.check(need)

    def offers(self, need: Need) -> list[Offer]:
        """The inner provider's, then the course's own servers; at an account's share of the price.

        Where the inner one can give no other server, the course's own are what there is. Its
        refusal is raised only where the course has none.
        """
        own = [one.offer for one in self.hosts.listed().values()]
        try:
            others = self.inner.offers(need)
        except HostKeyError:
            raise
        except NO_OTHER:
            if not own:
                raise
            others = []
        kinds = {(one.type, one.zone, one.spot) for one in others}
        own = [one for one in own if (one.type, one.zone, one.spot) not in kinds]
        return [self._shared(one) for one in (*others, *own)]

    def create(self, offer: Offer, request: CreateRequest) -> Server:
        folder, seating = self.hosts.folder, self.hosts.seating
        seats = {seat.lab_id: seat.name for seat in folder.seats(active_only=False)}
        name = seats.get(request.lab_id, request.lab)
        before = seating.of_lab(request.lab_id)
        sitting = seating.seat(request, name, self.hosts.sharing.places)
        try:
            self.hosts.settle(sitting.host)
        except LabError as error:
            if self.hosts.may_exist(sitting.host):
                raise
            # A place on a server that could not be made would be asked for again for ever, even
            # when another has room.
            seating.give_up(sitting, before)
            raise self._as_full(error) from error
        found = self.find(sitting.server_id)
        if found is None:
            raise LabError(
                f"{sitting.account} was not made on shared server {sitting.host}",
                hint="labctl course up   # again",
            )
        return found

    def find(self, server_id: str) -> Server | None:
        sitting = self.hosts.seating.of(server_id)
        if sitting is None or sitting.state == "gone":
            return None
        host = self.hosts.listed().get(sitting.host)
        return self._seen(sitting, host) if host else None

    def servers(self) -> list[Server]:
        """Every account of the course on a server that is there."""
        hosts = self.hosts.listed(now=True)
        return [
            self._seen(one, hosts[one.host])
            for one in self.hosts.seating.all()
            if one.state != "gone" and one.host in hosts
        ]

    def terminate(self, server_id: str) -> None:
        """End the account; its files stay where the server stays. The last one ends the server."""
        sitting = self.hosts.seating.of(server_id)
        if sitting is None or sitting.state == "gone":
            return
        self.hosts.seating.mark([sitting.token], "leaving")
        self.hosts.settle(sitting.host)

    def leftovers(self) -> list[Resource]:
        return self.inner.leftovers()

    def remove(self, resource: Resource) -> None:
        self.inner.remove(resource)

    def guarded_as(self, server_id: str) -> str:
        """The watchdog is that of the server which carries the account."""
        sitting = self.hosts.seating.of(server_id)
        return self.hosts.lab_id(sitting.host) if sitting else ""

    def prolong(self, server_id: str, span_s: int) -> None:
        """More time for the server, and so for everybody on it; PolicyError beyond `max_ttl`."""
        sitting = self.hosts.seating.of(server_id)
        host = self.hosts.listed().get(sitting.host) if sitting else None
        if sitting and host:
            ground = self.hosts.ground(sitting.host)
            server = ground.as_ours(host, None)
            deadlines.follow(ground, server, guard.extend(ground, server, span_s))

    def _as_full(self, error: LabError) -> LabError:
        """What kept another server from being made, told as what it means for a place."""
        count = len(self.hosts.listed())
        if not count or isinstance(error, HostKeyError) or not isinstance(error, NO_OTHER):
            return error
        places = self.hosts.sharing.places
        return PolicyError(
            f"all {count * places} places on the course's shared servers are taken",
            why=f"no other server can be made: {error.what}: {error.why}",
            hint="labctl course down --only NAME   # frees a place; or raise "
            "shared.accounts_per_server in course.yaml",
        )

    def _shared(self, offer: Offer) -> Offer:
        places = self.hosts.sharing.places
        whole = offer.on_demand_usd_per_hour
        return msgspec.structs.replace(
            offer,
            price_usd_per_hour=offer.price_usd_per_hour / places,
            on_demand_usd_per_hour=None if whole is None else whole / places,
        )

    def _seen(self, sitting: Sitting, host: Server) -> Server:
        known = self.hosts.course.state.server(host.id)
        way = known.endpoint if known else host.endpoint
        endpoint: Endpoint = msgspec.structs.replace(
            way, user=sitting.account, identity=sitting.identity
        )
        return Server(
            id=sitting.server_id,
            provider=self.name,
            lab=sitting.lab,
            lab_id=sitting.lab_id,
            alias=sitting.lab,
            endpoint=endpoint,
            offer=self._shared(host.offer),
            created_at=sitting.created_at,
            state="running" if sitting.state == "there" else "starting",
            deadline_at=host.deadline_at,
            account=host.account,
        )

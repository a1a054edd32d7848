"""Seats on shared servers: an account each, behind the contract of a provider.

For the rest of labctl an account is a server: it is created, found, listed and ended like one. The
shared servers are labs of the course itself, created for their first account and ended with the
last. The course's folder records which lab has which account.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import msgspec

from labctl.courses.class_cluster import ClassCluster, list_cluster_machines
from labctl.courses.class_queue import ClassQueue
from labctl.courses.records.folder import CourseFolder
from labctl.courses.seat_accounts import SeatAccounts, SharedServerAccount
from labctl.courses.seat_reporter import make_quiet_reporter
from labctl.errors import (
    CapacityError,
    HostKeyError,
    LabError,
    NoOfferError,
    PolicyError,
    QuotaError,
)
from labctl.events import Step
from labctl.lifecycle import up
from labctl.model import (
    Check,
    CreateServerRequest,
    Endpoint,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.servers import accounts, adoption, deadlines, end_server, guard
from labctl.servers.context import LabContext
from labctl.servers.shared_server import SharedAccount, Sharing, share
from labctl.wire.watchdog import WatchRecord

if TYPE_CHECKING:
    from labctl.providers import Provider

# Seconds for which one list of the shared servers counts as current.
FRESH_S = 5.0
# Seconds to wait for more simultaneous requests: a playbook takes seconds even for one account.
GATHER_S = 0.25
OVER = ("ending", "terminated")
# Accounts on the server of a course with Slurm, which has only one.
MOST_PLACES = 10_000
# Errors of a provider that has no further server for the course.
NO_OTHER = (CapacityError, NoOfferError, PolicyError, QuotaError)


def build_shared_context(folder: CourseFolder, course: LabContext) -> LabContext:
    """Return the course's context with accounts instead of servers."""
    # A cast, since its name is not that of a class: it is the inner provider's.
    return course.replace_provider(cast("Provider", SharedSeats(SharedServers(folder, course))))


class SharedServers:
    """The shared servers of a course, which are labs of the course itself."""

    def __init__(self, folder: CourseFolder, course: LabContext) -> None:
        self.folder = folder
        self.course = course
        self.seating = SeatAccounts(folder.private)
        self.queue = ClassQueue(folder, self.seating)
        self._guard = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._ready: dict[int, Server] = {}
        self._shared: set[int] = set()
        self._listed: tuple[float, list[Server]] = (0.0, [])
        # of a cluster, besides the controller
        self._nodes: list[Server] = []

    @functools.cached_property
    def sharing(self) -> Sharing:
        shared = self.folder.config.shared
        assert shared is not None, "used only for courses with shared servers"
        return Sharing(
            places=MOST_PLACES if shared.has_queue else shared.accounts_per_server,
            gpus=shared.gpus,
            gpu_lease_s=shared.gpu_lease,
            disk_bytes=self.folder.config.per_student.disk,
            has_queue=shared.has_queue,
            homes=shared.homes if self.cluster else "",
        )

    @functools.cached_property
    def cluster(self) -> ClassCluster | None:
        """The machines that Slurm makes one cluster; None for a course without a controller."""
        names = list_cluster_machines(self.folder.config, self.course.provider)
        return ClassCluster(self.folder, self.course, names) if names else None

    @functools.cached_property
    def price_shares(self) -> int:
        """The number of accounts that pay for one server."""
        if self.sharing.has_queue:
            return max(1, len(self.folder.list_seats()))
        return self.sharing.places

    def build_context(self, number: int) -> LabContext:
        """Build the context of a shared server. It has no budget: spending is limited per seat."""
        config = self.course.config
        need = msgspec.structs.replace(config.server.need, budget_usd=None)
        server = msgspec.structs.replace(config.server, need=need)
        if config.submits_jobs:  # from accounts; labctl itself uses no containers there
            server = msgspec.structs.replace(server, executor="process")
        own = msgspec.structs.replace(
            config,
            name=f"{self.folder.config.name[:28].rstrip('-')}-shared-{number}",
            root=self.folder.private / "hosts" / str(number),
            server=server,
        )
        own.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        context = self.course.make_sibling(own, self.lab_id(number))
        return self.cluster.narrow(context, self.cluster.controller) if self.cluster else context

    def lab_id(self, number: int) -> str:
        text = f"{self.folder.id} shared {number}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @functools.cached_property
    def _provider(self) -> Provider:
        """The provider of the servers with accounts. Of a cluster, that is only the controller."""
        return self.build_context(1).provider if self.cluster else self.course.provider

    def list_servers_by_number(self, *, now: bool = False) -> dict[int, Server]:
        """Return the servers that the provider lists, by number; at most FRESH_S seconds old."""
        with self._guard:
            at, servers = self._listed
            if now or time.monotonic() - at > FRESH_S or not at:
                servers = self._provider.servers()
                self._listed = (time.monotonic(), servers)
        numbers = {account.host for account in self.seating.list_all()}
        ids = {self.lab_id(number): number for number in numbers}
        return {
            ids[server.lab_id]: server
            for server in servers
            if server.lab_id in ids and server.state not in OVER
        }

    def can_exist(self, number: int) -> bool:
        """Tell whether the server exists, or may still appear after a lost reply."""
        if self.course.state.list_open_attempts(self.lab_id(number)):
            return True
        try:
            return number in self.list_servers_by_number(now=True)
        except LabError:
            return True  # unknown

    def apply_requests(self, number: int) -> None:
        """Create and remove one server's accounts as requested, for all waiting threads at once."""
        with self._lock(number):
            time.sleep(GATHER_S)
            mine = [account for account in self.seating.list_all() if account.host == number]
            if any(account.state == "wanted" for account in mine):
                # Requests that arrive while the server is created are included.
                self.ensure_server(number)
                mine = [account for account in self.seating.list_all() if account.host == number]
            coming = [account for account in mine if account.state == "wanted"]
            leaving = [account for account in mine if account.state == "leaving"]
            if not coming and not leaving:
                return  # another thread has done it
            staying = [account for account in mine if account.state == "there"]
            if coming or staying:
                self._update_accounts(number, coming, leaving)
            else:
                self._end_server(number, leaving)
            self.seating.set_state([account.token for account in coming], "there")
            self.seating.set_state([account.token for account in leaving], "gone")

    def ensure_server(self, number: int) -> Server:
        """Return a ready server, created if needed. Needs the server's lock held.

        Another process may have ended the previous one: only the provider knows.
        """
        ready, listed = self._ready.get(number), self.list_servers_by_number(now=True).get(number)
        if ready is None or listed is None or listed.id != ready.id:
            self._shared.discard(number)
            context = self.build_context(number)
            if self.cluster:
                self._require_same_controller()
                self.cluster.check()
            ready = up.up(context)
            if self.cluster:
                self._nodes = self.cluster.bring_up_nodes(context)
            self._ready[number] = ready
            self._listed = (0.0, [])
        return ready

    def _require_same_controller(self) -> None:
        """PolicyError if accounts are on another machine: Slurm's accounting is there, too."""
        assert self.cluster is not None, "used only for clusters"
        recorded = self.course.state.get_lab_server(self.lab_id(1))
        has_accounts = any(account.state != "gone" for account in self.seating.list_all())
        if recorded and recorded.offer.type != self.cluster.controller and has_accounts:
            name = recorded.offer.type
            raise PolicyError(
                f"course.yaml names another controller than {name}",
                why=f"the accounts, and the minutes that they have used, are on {name}",
                hint=f"set shared.controller to {name}, or type first: labctl course down",
            )

    def _update_accounts(
        self, number: int, coming: list[SharedServerAccount], leaving: list[SharedServerAccount]
    ) -> None:
        if not coming and not self._is_listed(number):
            return  # the server is gone, and the accounts with it
        context, server = self.build_context(number), self.ensure_server(number)
        uids = self._choose_uids([*coming, *leaving])
        accounts = [_make_shared_account(new, uids) for new in coming]
        accounts += [
            SharedAccount(name=old.account, uid=uids.get(old.account, 0)) for old in leaving
        ]
        names = ", ".join(account.name for account in accounts)
        step = Step(name=f"accounts on {server.alias}", detail=names)
        context.reporter.emit(step)
        if self.sharing.has_queue and leaving:
            self.queue.close(context, server, [old.account for old in leaving])
        share(
            server,
            accounts,
            self.sharing,
            playbooks_dir=context.paths.data_dir / "playbooks",
            connections=context.connections,
            reporter=make_quiet_reporter(context.reporter),
            only_accounts=number in self._shared or not coming,
            nodes=self._nodes,
        )
        if self.sharing.has_queue and coming:
            self.queue.update(context, server, [new.account for new in coming])
        self._shared.add(number)
        context.reporter.emit(msgspec.structs.replace(step, done=True))

    def update_queue(self) -> None:
        """Give the accounts that exist the limits of course.yaml, if Slurm enforces them.

        Those of students who have left lose their association.
        """
        for number, context, server in self._list_queues():
            accounts = [each for each in self.seating.list_all() if each.host == number]
            # Otherwise the first account sets everything up.
            if any(account.state == "there" for account in accounts):
                with self._lock(number):
                    nodes = self._join_new_nodes(context, server, accounts)
                    self.queue.update_or_repair(context, server, nodes)

    def _join_new_nodes(
        self, context: LabContext, server: Server, accounts: list[SharedServerAccount]
    ) -> list[Server]:
        """Return the cluster's nodes; machines new in course.yaml get the accounts and Slurm."""
        if self.cluster is None:
            return []
        nodes = self.cluster.list_nodes(context)
        if len(nodes) == len(self.cluster.nodes):
            return [node for _, node in nodes]
        self.ensure_server(1)
        there = [account for account in accounts if account.state == "there"]
        uids = self._choose_uids(there)
        share(
            server,
            [_make_shared_account(account, uids) for account in there],
            self.sharing,
            playbooks_dir=context.paths.data_dir / "playbooks",
            connections=context.connections,
            reporter=make_quiet_reporter(context.reporter),
            nodes=self._nodes,
        )
        return self._nodes

    def _choose_uids(self, accounts: list[SharedServerAccount]) -> dict[str, int]:
        """Return the accounts' numbers on a cluster's machines; nothing for a server of its own."""
        if self.cluster is None:
            return {}
        return self.cluster.choose_uids([account.account for account in accounts])

    def reserve_hours(self) -> None:
        """Reserve the class hours of the next days in Slurm. LabError if it does not answer."""
        for _, context, server in self._list_queues():
            self.queue.reserve_hours(context, server)

    def record_gpu_minutes(self) -> None:
        """Ask Slurm what each account has used, and record it. LabError if it does not answer."""
        for _, context, server in self._list_queues():
            self.queue.record_gpu_minutes(context, server)

    def _list_queues(self) -> Iterator[tuple[int, LabContext, Server]]:
        """List the servers on which Slurm runs, with their numbers and contexts."""
        if not self.sharing.has_queue:
            return
        for number, server in self.list_servers_by_number(now=True).items():
            context = self.build_context(number)
            # The record has the alias, and the host key that was pinned.
            yield number, context, context.state.get_server(server.id) or server

    def _end_server(self, number: int, leaving: list[SharedServerAccount]) -> None:
        """End a server with its last account, which is removed first: the machine may stay."""
        if self._is_listed(number):
            self._update_accounts(number, [], leaving)
            context = self.build_context(number)
            server = adoption.adopt(context)
            # A keeper brings the accounts up again before the next class.
            if server is not None and self.sharing.has_queue and not self.folder.config.keeper:
                self.queue.release_hours(context, server)
            if server is not None:
                end_server.remove(context, server)
            if self.cluster:
                self.cluster.end_nodes(context)
        self._ready.pop(number, None)
        self._shared.discard(number)
        self._listed = (0.0, [])

    def _is_listed(self, number: int) -> bool:
        """Tell whether the provider lists the server. PolicyError if another account answered."""
        if number in self.list_servers_by_number(now=True):
            return True
        recorded = self.course.state.get_lab_server(self.lab_id(number))
        if recorded is not None:
            accounts.is_gone(self.course, recorded)
        return False

    def _lock(self, number: int) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(number, threading.Lock())


def _make_shared_account(account: SharedServerAccount, uids: dict[str, int]) -> SharedAccount:
    uid = uids.get(account.account, 0)
    return SharedAccount(name=account.account, keys=(account.key,), uid=uid)


class SharedSeats:
    """A Provider whose servers are accounts. Everything else is passed to the inner provider.

    `create` waits until the account exists; simultaneous requests are handled together.
    """

    settings_type = Value
    settle_s = 0.0

    def __init__(self, hosts: SharedServers) -> None:
        self.hosts = hosts
        self.inner = hosts.course.provider
        self.name = self.inner.name

    def get_account(self) -> ProviderAccount:
        return self.inner.get_account()

    @property
    def s3_profile(self) -> str:
        return accounts.find_s3_profile(self.inner)

    @property
    def missing_bucket_setup(self) -> str:
        return accounts.find_missing_bucket_setup(self.inner)

    def check(self, need: Need | None = None) -> list[Check]:
        return self.inner.check(need)

    def offers(self, need: Need) -> list[Offer]:
        """Return the inner provider's offers, then the shared servers, at the price per account.

        If the inner provider has no further server, only the shared servers are offered. Its
        error is raised only without a shared server.
        """
        own = [server.offer for server in self.hosts.list_servers_by_number().values()]
        try:
            others = self.inner.offers(need)
        except HostKeyError:
            raise
        except NO_OTHER:
            if not own:
                raise
            others = []
        kinds = {(offer.type, offer.zone, offer.spot) for offer in others}
        own = [offer for offer in own if (offer.type, offer.zone, offer.spot) not in kinds]
        return [self._price_per_account(offer) for offer in (*others, *own)]

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        folder, seating = self.hosts.folder, self.hosts.seating
        seats = {seat.lab_id: seat.name for seat in folder.list_seats(active_only=False)}
        name = seats.get(request.lab_id, request.lab)
        before = seating.find_by_lab(request.lab_id)
        sitting = seating.reserve(request, name, self.hosts.sharing.places)
        try:
            self.hosts.apply_requests(sitting.host)
        except LabError as error:
            if self.hosts.can_exist(sitting.host):
                raise
            # Otherwise every retry would ask for a place on the server that could not be created,
            # even if another server has room.
            seating.withdraw(sitting, before)
            raise self._as_full_error(error) from error
        server = self.find(sitting.server_id)
        if server is None:
            raise LabError(
                f"account {sitting.account} was not created on shared server {sitting.host}",
                hint="labctl course up   # again",
            )
        return server

    def find(self, server_id: str) -> Server | None:
        sitting = self.hosts.seating.find_by_server(server_id)
        if sitting is None or sitting.state == "gone":
            return None
        host = self.hosts.list_servers_by_number().get(sitting.host)
        return self._as_server(sitting, host) if host else None

    def servers(self) -> list[Server]:
        """Return every account of the course on a server that exists."""
        hosts = self.hosts.list_servers_by_number(now=True)
        return [
            self._as_server(account, hosts[account.host])
            for account in self.hosts.seating.list_all()
            if account.state != "gone" and account.host in hosts
        ]

    def terminate(self, server_id: str) -> None:
        """End the account; the last one ends the server. Its files stay as long as the server."""
        sitting = self.hosts.seating.find_by_server(server_id)
        if sitting is None or sitting.state == "gone":
            return
        self.hosts.seating.set_state([sitting.token], "leaving")
        self.hosts.apply_requests(sitting.host)

    def leftovers(self) -> list[Resource]:
        return self.inner.leftovers()

    def remove(self, resource: Resource) -> None:
        self.inner.remove(resource)

    def get_guarded_lab_id(self, server_id: str) -> str:
        """Return the lab id of the shared server, whose watchdog guards the account."""
        sitting = self.hosts.seating.find_by_server(server_id)
        return self.hosts.lab_id(sitting.host) if sitting else ""

    def extend_life(self, server_id: str, span_s: int) -> WatchRecord | None:
        """Give the server, and so everybody on it, more time; PolicyError beyond `max_ttl`.

        The watchdog's report is not always readable for the accounts on the server.
        """
        sitting = self.hosts.seating.find_by_server(server_id)
        host = self.hosts.list_servers_by_number().get(sitting.host) if sitting else None
        if not sitting or not host:
            return None
        context = self.hosts.build_context(sitting.host)
        server = context.assign_alias(host, None)
        watch = guard.extend(context, server, span_s)
        deadlines.move_timer(context, server, watch)
        if self.hosts.cluster:
            self.hosts.cluster.extend_nodes(context, span_s)
        return watch

    def _as_full_error(self, error: LabError) -> LabError:
        """Turn the reason why no other server can be created into "all places are taken"."""
        count = len(self.hosts.list_servers_by_number())
        if not count or isinstance(error, HostKeyError) or not isinstance(error, NO_OTHER):
            return error
        places = self.hosts.sharing.places
        return PolicyError(
            f"all {count * places} places on the course's shared servers are taken",
            why=f"no other server can be created: {error.what}: {error.why}",
            hint="labctl course down --only NAME   # frees a place"
            if self.hosts.sharing.has_queue
            else "labctl course down --only NAME   # frees a place. Or raise "
            "shared.accounts_per_server in course.yaml",
        )

    def _price_per_account(self, offer: Offer) -> Offer:
        places = self.hosts.price_shares
        on_demand = offer.on_demand_usd_per_hour
        return msgspec.structs.replace(
            offer,
            price_usd_per_hour=offer.price_usd_per_hour / places,
            on_demand_usd_per_hour=None if on_demand is None else on_demand / places,
        )

    def _as_server(self, sitting: SharedServerAccount, host: Server) -> Server:
        recorded = self.hosts.course.state.get_server(host.id)
        host_endpoint = recorded.endpoint if recorded else host.endpoint
        endpoint: Endpoint = msgspec.structs.replace(
            host_endpoint, user=sitting.account, identity=sitting.identity
        )
        return Server(
            id=sitting.server_id,
            provider=self.name,
            lab=sitting.lab,
            lab_id=sitting.lab_id,
            alias=sitting.lab,
            endpoint=endpoint,
            offer=self._price_per_account(host.offer),
            created_at=sitting.created_at,
            state="running" if sitting.state == "there" else "starting",
            deadline_at=host.deadline_at,
            account=host.account,
        )

"""The shared servers of a course, and the accounts on them.

The servers are labs of the course itself, created for their first account and ended with the last.
The course's folder records which lab has which account.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import msgspec

from labctl.courses.account_changes import AccountChanges, AccountOutcomes
from labctl.courses.class_cluster import ClassCluster, choose_gpus, list_cluster_machines
from labctl.courses.class_queue import ClassQueue
from labctl.courses.cluster_session import ClusterSession, UidChoice
from labctl.courses.records.folder import CourseFolder
from labctl.courses.seat_accounts import SeatAccounts, SharedServerAccount
from labctl.courses.seat_reporter import make_quiet_reporter
from labctl.errors import (
    CapacityError,
    LabError,
    NoOfferError,
    PolicyError,
    QuotaError,
)
from labctl.events import Step
from labctl.lifecycle import up
from labctl.model import (
    Offer,
    Server,
)
from labctl.servers import accounts, adoption, end_server
from labctl.servers.context import LabContext
from labctl.servers.shared_server import SharedAccount, Sharing, share
from labctl.state.locks import hold_lock

if TYPE_CHECKING:
    from labctl.providers import Provider

# Seconds for which one list of the shared servers counts as current.
FRESH_S = 5.0
# Seconds to wait for more simultaneous requests: a playbook takes seconds even for one account.
GATHER_S = 0.25
OVER = ("ending", "terminated")
CLUSTER_LOCK = "cluster.lock"
# Seconds for another process to create a whole class's accounts on the cluster.
CLUSTER_LOCK_S = 900.0
# Accounts on the server of a course with Slurm, which has only one.
MOST_PLACES = 10_000
# Errors of a provider that has no further server for the course.
NO_OTHER = (CapacityError, NoOfferError, PolicyError, QuotaError)


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
        # The ids of the servers that this process has prepared.
        self._prepared: set[str] = set()
        self._listed: tuple[float, list[Server]] = (0.0, [])
        self.outcomes = AccountOutcomes(self.seating)

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
        if config.submits_jobs:  # only the students' runs do; they may be containers
            server = msgspec.structs.replace(server, executor="docker")
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
        """Create and remove one server's accounts as requested, for all waiting threads at once.

        Accounts stay "leaving" while a machine of a cluster does not answer. `outcomes` says which
        of them were refused; the others are done.
        """
        arrived = time.monotonic()
        with self.hold_server(number), self.hold_queue():
            time.sleep(GATHER_S)
            mine = [account for account in self.seating.list_all() if account.host == number]
            if self.outcomes.list_due(mine, "wanted", arrived):
                # Requests that arrive while the server is created are included.
                self.ensure_server(number)
                mine = [account for account in self.seating.list_all() if account.host == number]
            coming = self.outcomes.list_due(mine, "wanted", arrived)
            leaving = self.outcomes.list_due(mine, "leaving", arrived)
            if not coming and not leaving:
                return  # another thread has done it
            if coming or any(account.state == "there" for account in mine):
                changes = self._update_accounts(number, coming, leaving)
            else:
                changes = self._end_server(number, leaving)
            self.outcomes.record(coming, leaving, changes)

    def ensure_server(self, number: int) -> Server:
        """Return a ready server, created if needed. Needs the server's lock held.

        Another process may have ended the previous one: only the provider knows.
        """
        ready, listed = self._ready.get(number), self.list_servers_by_number(now=True).get(number)
        if ready is None or listed is None or listed.id != ready.id:
            context = self.build_context(number)
            if self.cluster:
                self._require_same_controller()
                self.cluster.connect()
                self.cluster.forget_others()
            ready = up.up(context)
            self._prepared.discard(ready.id)
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
                hint=f"set shared.controller in course.yaml to {name} again\nlabctl course plan",
            )

    def _update_accounts(
        self, number: int, coming: list[SharedServerAccount], leaving: list[SharedServerAccount]
    ) -> AccountChanges:
        """Create and disable these accounts. Returns what remains to be done."""
        if not coming and not self._is_listed(number):
            return AccountChanges()  # the server is gone, and the accounts with it
        session = self.cluster.connect() if self.cluster else None
        if session:  # staff may have deleted some
            leaving = [old for old in leaving if session.has_account(old.account)]
        names = [account.account for account in (*coming, *leaving)]
        # Before anything changes: it leaves out accounts that cannot be the same everywhere.
        choice = session.choose_uids(names, self.sharing.homes) if session else UidChoice()
        context, server = self.build_context(number), self.ensure_server(number)
        if self.sharing.has_queue and leaving:
            self.queue.close(context, server, [old.account for old in leaving])
        coming = [new for new in coming if new.account not in choice.errors]
        leaving = [old for old in leaving if old.account not in choice.errors]
        if coming or leaving:
            changes = [make_account(new, choice.uids) for new in coming]
            changes += [_make_disabled_account(old, choice.uids) for old in leaving]
            names = [account.name for account in changes]
            step = Step(name=f"accounts on {server.alias}", detail=", ".join(names))
            context.reporter.emit(step)
            self.share_accounts(context, server, changes, session, is_ending=not coming)
            if self.sharing.has_queue and coming:
                self.queue.update(context, server, [new.account for new in coming])
            context.reporter.emit(msgspec.structs.replace(step, done=True))
        return AccountChanges(tuple(session.failures) if session else (), choice.errors)

    def share_accounts(
        self,
        context: LabContext,
        server: Server,
        accounts: list[SharedAccount],
        session: ClusterSession | None,
        *,
        sets_up: bool = False,
        is_ending: bool = False,
    ) -> None:
        """Change accounts on the server, and on the machines of its cluster that answer.

        Prepares the machines unless this process has done so; with `sets_up`, once more. With
        `is_ending` a machine that was never prepared is left out: it has no accounts to end.
        """
        others: list[Server] = []
        if self.cluster and session:
            if is_ending:
                session.skip_unprepared(context.reporter)
            others = self.cluster.bring_up_others(context, session)
            session.report_failures(context.reporter)
        ids = {server.id, *(other.id for other in others)}
        if is_ending:
            only_accounts = session is None or session.is_controller_prepared
        else:
            only_accounts = ids <= self._prepared and not sets_up
        share(
            server,
            accounts,
            self.sharing,
            playbooks_dir=context.paths.data_dir / "playbooks",
            connections=context.connections,
            reporter=make_quiet_reporter(context.reporter),
            only_accounts=only_accounts,
            sets_up_queue=session is None or session.can_configure,
            nodes=others,
        )
        if not only_accounts:
            self._prepared |= ids

    def describe_offer(self, server: Server) -> Offer:
        """Return the server's offer, with the GPUs that one job can get."""
        if self.cluster is None:
            return server.offer
        others = self.cluster.list_others(self.build_context(1))
        return choose_gpus(server.offer, [other.offer for _, other in others])

    def _end_server(self, number: int, leaving: list[SharedServerAccount]) -> AccountChanges:
        """End a server with its last account, which is removed first: the machine may stay.

        Returns what remains to be done with the accounts: because of it, nothing else has ended.
        """
        if self._is_listed(number):
            changes = self._update_accounts(number, [], leaving)
            context = self.build_context(number)
            server = adoption.adopt(context)
            # A keeper brings the accounts up again before the next class.
            if server is not None and self.sharing.has_queue and not self.folder.config.keeper:
                self.queue.release_hours(context, server)
            if changes.unusable or changes.errors:
                return changes
            # The controller last: without it, a second try would find nothing to do.
            if self.cluster:
                self.cluster.end_others(context)
            if server is not None:
                end_server.remove(context, server)
        self._ready.pop(number, None)
        self._listed = (0.0, [])
        return AccountChanges()

    def _is_listed(self, number: int) -> bool:
        """Tell whether the provider lists the server. PolicyError if another account answered."""
        if number in self.list_servers_by_number(now=True):
            return True
        recorded = self.course.state.get_lab_server(self.lab_id(number))
        if recorded is not None:
            accounts.is_gone(self.course, recorded)
        return False

    def hold_queue(self) -> AbstractContextManager[None]:
        """Keep other processes from changing Slurm, or the machines and accounts of its cluster."""
        if not self.sharing.has_queue:
            return nullcontext()
        what = "changing accounts of the cluster"
        lock = self.folder.private / CLUSTER_LOCK
        return hold_lock(lock, what, wait_s=CLUSTER_LOCK_S, is_command=False)

    def hold_server(self, number: int) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(number, threading.Lock())


def make_account(account: SharedServerAccount, uids: dict[str, int]) -> SharedAccount:
    uid = uids.get(account.account, 0)
    return SharedAccount(name=account.account, keys=(account.key,), uid=uid)


def _make_disabled_account(account: SharedServerAccount, uids: dict[str, int]) -> SharedAccount:
    return SharedAccount(name=account.account, uid=uids.get(account.account, 0))

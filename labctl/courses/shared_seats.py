"""Seats on shared servers, behind the contract of a provider: for labctl an account is a server.

It is created, found, listed and ended like one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from labctl.courses.queue_upkeep import QueueUpkeep
from labctl.courses.records.folder import CourseFolder
from labctl.courses.seat_accounts import SharedServerAccount
from labctl.courses.shared_servers import NO_OTHER, SharedServers
from labctl.errors import HostKeyError, LabError, PolicyError
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
from labctl.servers import accounts, deadlines, guard
from labctl.servers.context import LabContext
from labctl.wire.watchdog import WatchRecord

if TYPE_CHECKING:
    from labctl.providers import Provider


def build_shared_context(folder: CourseFolder, course: LabContext) -> LabContext:
    """Return the course's context with accounts instead of servers."""
    # A cast, since its name is not that of a class: it is the inner provider's.
    return course.replace_provider(cast("Provider", SharedSeats(SharedServers(folder, course))))


class SharedSeats:
    """A Provider whose servers are accounts. Everything else is passed to the inner provider.

    `create` waits until the account exists; simultaneous requests are handled together.
    """

    settings_type = Value
    settle_s = 0.0

    def __init__(self, hosts: SharedServers) -> None:
        self.hosts = hosts
        self.upkeep = QueueUpkeep(hosts)
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
        if refusal := self.hosts.outcomes.get_refusal(sitting):
            seating.withdraw(sitting, before)
            raise refusal
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
        return self._as_server(sitting, self._describe_host(host)) if host else None

    def servers(self) -> list[Server]:
        """Return every account of the course on a server that exists."""
        listed = self.hosts.list_servers_by_number(now=True)
        # Once for each server: that of a cluster reads the records of all its machines.
        hosts = {number: self._describe_host(host) for number, host in listed.items()}
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
        if refusal := self.hosts.outcomes.get_refusal(sitting):
            raise refusal
        if self.is_leaving(server_id):
            raise LabError(
                f"account {sitting.account} has not ended on every machine of the cluster",
                why="one of them did not answer; on the others, nobody can log in to the account",
                hint="labctl course down   # again, after you repaired that machine or took it out "
                "of hosts",
            )

    def is_leaving(self, server_id: str) -> bool:
        """Whether the account was asked to end, and has not ended everywhere."""
        sitting = self.hosts.seating.find_by_server(server_id)
        return sitting is not None and sitting.state == "leaving"

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
            self.hosts.cluster.extend_others(context, watch, self.hosts.cluster.other_machines)
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

    def _describe_host(self, host: Server) -> Server:
        """Return a shared server with its recorded address, and the offer that an account gets."""
        recorded = self.hosts.course.state.get_server(host.id)
        return msgspec.structs.replace(
            host,
            endpoint=recorded.endpoint if recorded else host.endpoint,
            offer=self._price_per_account(self.hosts.describe_offer(host)),
        )

    def _as_server(self, sitting: SharedServerAccount, host: Server) -> Server:
        """Return the account as a server. `host` comes from `_describe_host`."""
        endpoint: Endpoint = msgspec.structs.replace(
            host.endpoint, user=sitting.account, identity=sitting.identity
        )
        return Server(
            id=sitting.server_id,
            provider=self.name,
            lab=sitting.lab,
            lab_id=sitting.lab_id,
            alias=sitting.lab,
            endpoint=endpoint,
            offer=host.offer,
            created_at=sitting.created_at,
            state="running" if sitting.state == "there" else "starting",
            deadline_at=host.deadline_at,
            account=host.account,
        )

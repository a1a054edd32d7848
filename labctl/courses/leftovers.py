"""A course's leftovers at its providers: whose they are, and whether they cost money."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from labctl.courses import metering
from labctl.courses.context import OWN, build_own_seat
from labctl.courses.grading_server import build_other_grading_context
from labctl.courses.records.ledger_servers import read_servers
from labctl.courses.seat_accounts import MOST_HOSTS
from labctl.courses.servers import CourseOperator
from labctl.courses.shared_servers import SharedServers
from labctl.errors import LabError
from labctl.events import Step
from labctl.model import Resource, Server, Value
from labctl.servers import disk_retention, disks, end_server, leftovers
from labctl.servers.context import LabContext
from labctl.state.disks import is_expired

# Resources that are removed at the same time.
AT_ONCE = 16


def list_lab_ids(staff: CourseOperator) -> set[str]:
    """Return the lab ids of the course and of all its seats, past ones included.

    Call it once: it reads the ledger.
    """
    folder = staff.folder
    seats = [*folder.list_seats(active_only=False, former=True), *folder.list_past_seats()]
    return {folder.id, *list_own_lab_ids(staff), *(seat.lab_id for seat in seats)}


def remove_expired_disks(staff: CourseOperator) -> list[Resource]:
    """Remove the kept disks that have expired; return those that stay.

    A baked image belongs to the course and is not touched.
    """
    course = staff.course(plain=True)
    if not disk_retention.can_keep(course.provider):
        return []
    labs = list_lab_ids(staff) - {staff.folder.id}
    resources = [resource for resource in course.provider.leftovers() if resource.lab_id in labs]
    disks.remove_expired(course, resources)
    return [resource for resource in resources if resource.expires_at and not is_expired(resource)]


def list_own_lab_ids(staff: CourseOperator) -> set[str]:
    """Return the lab ids of the course's own servers, shared ones included."""
    lab_ids = {build_own_seat(staff.folder, purpose).lab_id for purpose in OWN}
    if staff.folder.config.shared is not None:
        hosts = SharedServers(staff.folder, staff.course(plain=True))
        lab_ids |= {hosts.lab_id(number) for number in range(MOST_HOSTS + 1)}
        lab_ids |= hosts.cluster.list_lab_ids() if hosts.cluster else set()
    return lab_ids


def remove_timers(
    course: LabContext, lab_ids: set[str], leftover_resources: Sequence[Resource]
) -> None:
    """Remove free resources of these labs, such as timers at the provider."""
    free = [
        resource
        for resource in leftover_resources
        if resource.lab_id in lab_ids and not (resource.price_usd_per_month or resource.expires_at)
    ]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda resource: end_server.remove_resources(course, [resource]), free))


class ProviderLeftovers(Value, frozen=True):
    """What a provider still shows of the course at the end. Empty means that nothing bills.

    `former` is True if course.yaml names another provider by now, so that nothing was ended at this
    one. `seats` maps lab ids to seats' names. `error` says why the provider could not be asked.
    """

    provider: str
    servers: tuple[Server, ...] = ()
    resources: tuple[Resource, ...] = ()
    error: str = ""
    former: bool = False
    seats: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def has_costs(self) -> bool:
        """Whether something still costs money there, or the provider could not be asked."""
        has_paid = any(resource.price_usd_per_month > 0 for resource in self.resources)
        return bool(self.error or self.servers or has_paid)


def build_provider_contexts(staff: CourseOperator) -> list[LabContext]:
    """Build a context for each provider in course.yaml: that of the seats, and that of grading.

    They list every region, so two settings of a provider in one account need only one context.
    """
    course = staff.course(everywhere=True, plain=True)
    grading = build_other_grading_context(staff)
    if grading is None or _is_same_account(course, grading):
        return [course]
    return [course, msgspec.structs.replace(grading, everywhere=True)]


def _is_same_account(course: LabContext, grading: LabContext) -> bool:
    if course.provider.name != grading.provider.name:
        return False
    try:
        first, second = course.provider.get_account().id, grading.provider.get_account().id
    except LabError:
        return False
    return bool(first) and first == second


def list_leftovers(staff: CourseOperator) -> list[ProviderLeftovers]:
    """List what every provider still shows of the course, in every region, free caches aside.

    This includes providers that course.yaml named before, if servers of seats cost something there
    or have not ended.
    """
    results = [_list_leftovers(staff, context) for context in build_provider_contexts(staff)]
    course = staff.course(everywhere=True, plain=True)
    former = {
        server.provider
        for server in read_servers(staff.folder.ledger.list_entries()).values()
        if server.provider not in ("", course.provider.name) and (server.price or not server.ended)
    }
    for name in sorted(former - {result.provider for result in results}):
        server = msgspec.structs.replace(course.config.server, provider=name)
        config = msgspec.structs.replace(course.config, server=server)
        results.append(
            _list_leftovers(staff, msgspec.structs.replace(course, config=config), former=True)
        )
    return _drop_repetitions(results)


def _drop_repetitions(results: list[ProviderLeftovers]) -> list[ProviderLeftovers]:
    """Name everything only once: two settings of a provider, in one account, list the same."""
    seen: set[tuple[str, ...]] = set()
    different = []
    for result in results:
        servers = {("server", server.provider, server.id): server for server in result.servers}
        resources = {(one.kind, one.provider, one.region, one.id): one for one in result.resources}
        different.append(
            msgspec.structs.replace(
                result,
                servers=tuple(server for key, server in servers.items() if key not in seen),
                resources=tuple(one for key, one in resources.items() if key not in seen),
            )
        )
        seen |= servers.keys() | resources.keys()
    return different


def _list_leftovers(
    staff: CourseOperator, context: LabContext, *, former: bool = False
) -> ProviderLeftovers:
    name = context.config.server.provider
    step = Step(name=f"listing what is left at {name}")
    staff.reporter.emit(step)
    try:
        ours = list_lab_ids(staff)
        open_servers = metering.list_open_servers(staff.folder.ledger.list_entries(), context)
        metering.require_same_account(context, open_servers, ours)
        servers = [
            server
            for server in context.provider.servers()
            if server.state != "terminated" and server.lab_id in ours
        ]
        resources = [
            resource
            for resource in context.provider.leftovers()
            if resource.kind != leftovers.CACHE and resource.lab_id in ours
        ]
    except LabError as error:
        message = ": ".join(filter(None, [error.what, error.why]))
        return ProviderLeftovers(provider=name, error=message, former=former)
    staff.reporter.emit(msgspec.structs.replace(step, done=True))
    labs = {server.lab_id for server in servers} | {resource.lab_id for resource in resources}
    seats = staff.folder.list_seats(active_only=False, former=True)
    return ProviderLeftovers(
        provider=name,
        servers=tuple(servers),
        resources=tuple(resources),
        former=former,
        seats={seat.lab_id: seat.name for seat in seats if seat.lab_id in labs},
    )

"""Create the servers of a lab that has several: all of them in one zone, or none.

Their processes exchange data at every step, which is slow between zones and costs money there. A
part of the servers would be of no use and cost money.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from labctl.errors import CapacityError, LabError, PolicyError
from labctl.events import Note, report_wait
from labctl.lifecycle.fleet import LabOutcome, run_for_each
from labctl.model import Offer, Server
from labctl.runs import images
from labctl.servers import adoption, affordable_offers, attempts, end_server, gpus, price_consent
from labctl.servers.context import LabContext
from labctl.stores.lab_store import warn_before_start
from labctl.text import names_text


class Place(NamedTuple):
    """Where a server is, and what it is: all servers of a lab are alike."""

    region: str
    zone: str
    type: str

    def __str__(self) -> str:
        where = self.zone or self.region
        return f"{self.type} in {where}" if where else self.type


def _find_place(offer: Offer) -> Place:
    return Place(offer.region, offer.zone, offer.type)


def create_missing_servers(
    context: LabContext,
    members: Sequence[LabContext],
    on_create: Callable[[Server], None] = lambda server: None,
) -> None:
    """Create the servers of those `members` that have none, alike and in one zone.

    If one cannot be created, those that were just created are ended, and the next zone is tried.
    CapacityError if no zone has room for all. Servers that exist already stay, and others become
    like them.
    """
    with report_wait(context.reporter, f"checking {context.provider.name}"):
        listed = context.provider.servers()
        servers = {one.lab_id: adoption.adopt(one, listed) for one in members}
    existing = [server for server in servers.values() if server is not None]
    missing = [one for one in members if servers[one.lab_id] is None]
    if not missing:
        return
    warn_before_start(context)
    gpus.warn_of_unknown_model(context)
    image = images.find_wanted_image(context)
    repeated: list[Server] = []
    try:
        _repeat_open_attempts(missing, repeated)
        created = repeated + _create(context, missing, image, existing, repeated)
    except LabError as error:
        _end_servers(missing, repeated)
        attempts.remove_unused_resources(missing[0])
        # The zone of an interrupted `up` may be full by now; another one may have room for all.
        if existing or not repeated or not isinstance(error, CapacityError):
            raise
        created = _create(context, missing, image, [], [])
    for server in created:
        on_create(server)


def _repeat_open_attempts(missing: Sequence[LabContext], repeated: list[Server]) -> None:
    """Add to `repeated` the servers that an interrupted `up` asked for."""
    for one in missing:
        if server := attempts.repeat_open_attempt(one):
            repeated.append(server)


def _create(
    context: LabContext,
    missing: Sequence[LabContext],
    image: str,
    existing: Sequence[Server],
    repeated: Sequence[Server],
) -> list[Server]:
    """Create a server for each of those that also lack a repeated one."""
    ready = {server.lab_id for server in repeated}
    missing = [one for one in missing if one.lab_id not in ready]
    if not missing:
        return []
    if adoption.is_leased(context):
        return _lease_machines(missing, image)
    places = {_find_place(server.offer) for server in [*existing, *repeated]}
    return _create_in_one_zone(context, missing, image, places)


def _lease_machines(missing: Sequence[LabContext], image: str) -> list[Server]:
    """Lease a machine for each, one after another: each offer is one machine."""
    created: list[Server] = []
    try:
        for one in missing:
            created.append(attempts.create_server(one, one.config.server.need, image))
    except LabError:
        _end_servers(missing, created)
        raise
    return created


def _create_in_one_zone(
    context: LabContext, missing: Sequence[LabContext], image: str, places: set[Place]
) -> list[Server]:
    """Create all servers from the first offer that has capacity for them.

    `places` are those of the servers that exist already; without any, every offer will do.
    """
    first = missing[0]
    need = first.config.server.need
    # Each server has its share of the budget; a price must fit into what is left of every share.
    poorest = min(missing, key=lambda one: affordable_offers.budget_left_usd(one, need) or 0.0)
    offers = affordable_offers.list_affordable_offers(poorest, need)
    offers = [offer for offer in offers if not places or _find_place(offer) in places]
    full: list[str] = []
    for offer in price_consent.confirm_prices(
        first, need, offers[: attempts.MOST_OFFERS], count=len(missing)
    ):
        try:
            return _create_all(missing, offer, image)
        except CapacityError as error:
            context.reporter.emit(Note(text=f"{error.what}; no server of this zone is kept"))
            full.append(str(_find_place(offer)))
        except LabError:
            attempts.remove_unused_resources(first)
            raise
    attempts.remove_unused_resources(first)
    raise _make_capacity_error(context, len(missing), full, places)


def _make_capacity_error(
    context: LabContext, count: int, full: list[str], places: set[Place]
) -> LabError:
    provider = context.provider.name
    if places:
        alike = names_text(sorted(map(str, places)), 3)
        return CapacityError(
            f"{provider} has no room for {count} more x {alike}",
            why=f"the lab's other servers are {alike}, and all must be alike and in one zone",
            hint=f"{context.subject.up}   # again in some minutes\n"
            f"{context.subject.down} && {context.subject.up}   # or all of them in another zone",
        )
    return CapacityError(
        f"{provider} has no zone with room for {count} servers of {context.name}",
        why="\n".join(f"not {count} x {kind}" for kind in full) or "there are no offers",
        hint=f"{context.subject.offers}\n"
        f"{context.subject.up} --gpu MODEL   # another type; or lower `count:` in "
        f"{context.subject.config_file}",
    )


def _create_all(missing: Sequence[LabContext], offer: Offer, image: str) -> list[Server]:
    """Create a server for each from one offer; after a failure, end those that were created."""

    def create(one: LabContext) -> Server:
        return attempts.attempt_offer(one, one.config.server.need, offer, image)

    outcomes = run_for_each(missing, create)
    created = [outcome.value for outcome in outcomes if outcome.value is not None]
    if error := _choose_error(outcomes):
        _end_servers(missing, created)
        raise error
    return created


def _choose_error(outcomes: Sequence[LabOutcome[Server]]) -> LabError | None:
    """Return the error that matters: another zone helps only if each one is about capacity."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    others = [error for error in errors if not isinstance(error, CapacityError)]
    return next(iter([*others, *errors]), None)


def _end_servers(missing: Sequence[LabContext], created: Sequence[Server]) -> None:
    """End servers that were just created, and wait until the provider confirms it."""
    ours = {server.lab_id: server for server in created}
    owners = [one for one in missing if one.lab_id in ours]
    end = partial(_end_server, ours)
    failed = [outcome.error for outcome in run_for_each(owners, end) if outcome.error]
    if failed:
        raise PolicyError(
            "not all servers could be created, and not all of those that were could be ended",
            why="\n".join(str(error) for error in failed),
            hint=owners[0].subject.down,
        )


def _end_server(ours: dict[str, Server], context: LabContext) -> None:
    end_server.remove(context, ours[context.lab_id])

"""Everything that bears our tag at a provider, whatever this machine remembers of it."""

from __future__ import annotations

import time

from labctl.errors import PolicyError
from labctl.events import Decision, Note, Step
from labctl.model import ProviderAccount, Resource, Server, Value
from labctl.servers import accounts, attempts, cost, disks, end_server
from labctl.servers.context import Ground
from labctl.servers.open_costs import told_what_bills

# Kind of a resource that costs nothing and makes the next server quicker: it is left alone.
CACHE = "cache"


class Orphans(Value, frozen=True):
    """What there is. `here` are the ids of servers that this machine's own record knows.

    `elsewhere` names what that record has in other accounts of the provider, servers and what
    interrupted `up`s may have made.
    """

    servers: tuple[Server, ...]
    resources: tuple[Resource, ...]
    here: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def billing(self) -> bool:
        """Whether anything is left that costs money, or may."""
        paid = any(one.price_usd_per_month > 0 for one in self.resources)
        servers = any(one.state != "terminated" for one in self.servers)
        return paid or servers or bool(self.elsewhere)


def orphans(ground: Ground) -> Orphans:
    """What the provider shows, servers first. Kept disks are among the resources."""
    with told_what_bills(ground, every_lab=True):
        _warn(ground)
    return _shown(ground)


def _warn(ground: Ground) -> None:
    """Say what the provider's list cannot show: what is still coming, and what is elsewhere."""
    for attempt in attempts.unheard(ground, every_lab=True):
        text = f"an interrupted `up` of {attempt.request.lab} may have made a server"
        said = f"{text} that is not shown yet: ask again in a minute"
        ground.reporter.emit(Note(text=said, level="warning"))
    for name, account_id in _elsewhere(ground).items():
        profile = accounts.profile_of(ground, account_id)
        account = ProviderAccount(id=account_id, profile=profile)
        text = f"{name} belongs to {accounts.describe(ground.provider.name, account)}"
        next_ = accounts.switch_to(ground, account_id, "labctl orphans")
        ground.reporter.emit(Note(text=f"{text}; next: {next_}", level="warning"))


def _elsewhere(ground: Ground) -> dict[str, str]:
    """What this machine has on record in other accounts of the provider: name -> account."""
    provider = ground.provider.name
    found = {
        f"the server {one.id} of {one.lab}": one.account
        for one in ground.state.servers()
        if one.provider == provider and one.state not in accounts.ENDED
    }
    found |= {
        f"what an interrupted `up` of {one.request.lab} may have made": one.account
        for one in ground.state.open_attempts()
        if one.provider == provider
    }
    return {name: one for name, one in found.items() if accounts.is_elsewhere(ground, one)}


def _shown(ground: Ground) -> Orphans:
    with told_what_bills(ground, every_lab=True):
        servers = [one for one in ground.provider.servers() if one.state != "terminated"]
        others = ground.provider.leftovers()
    disks.looked(ground, others, None)
    ids = {one.id for one in servers}
    resources = [
        one for one in others if one.kind != CACHE and (one.expires_at or one.server_id not in ids)
    ]
    known = {one.id for one in ground.state.servers()}
    return Orphans(
        servers=tuple(servers),
        resources=tuple(resources),
        here=tuple(sorted(ids & known)),
        elsewhere=tuple(_elsewhere(ground)),
    )


def end_them(ground: Ground, found: Orphans, *, kept_too: bool) -> Orphans:
    """Terminate and remove what was found; what is left then. Results on them are lost.

    Disks that were kept for their data go once their time is over, before that only with
    `kept_too`. PolicyError where the person says no.
    """
    found = _heard(ground, found)
    doomed = [one for one in found.resources if kept_too or _is_over(one)]
    if not found.servers and not doomed:
        return found
    names = {one.lab for one in found.servers} | {one.lab or one.lab_id for one in doomed}
    labs = ", ".join(sorted(names - {""}))
    asked = Decision(
        question=f"terminate {len(found.servers)} servers and remove {len(doomed)} other things?",
        detail=f"labs: {labs}\nResults that are only there are lost; labctl down saves them first.",
    )
    if not ground.reporter.ask(asked):
        raise PolicyError(
            "nothing was terminated",
            why="it was not agreed to",
            hint="labctl orphans --terminate --yes",
        )
    for server in found.servers:
        cost.note_life(ground.state, server)
    end_server.end(ground, found.servers)

    def rest() -> list[Resource]:
        # Things show themselves late, servers and what those held until they were gone.
        end_server.end(ground, _shown(ground).servers)
        return [one for one in _shown(ground).resources if kept_too or _is_over(one)]

    end_server.take_away(ground, rest(), rest)
    return _shown(ground)


def _heard(ground: Ground, found: Orphans) -> Orphans:
    """What is there once all that interrupted `up`s may have made has had its time to show."""
    if not attempts.unheard(ground, every_lab=True):
        return found
    ground.reporter.emit(Step(name="waiting for what an interrupted `up` may have made"))
    while attempts.unheard(ground, every_lab=True):
        time.sleep(min(1.0, ground.provider.settle_s))
    return _shown(ground)


def _is_over(one: Resource) -> bool:
    """Whether nobody wants it. A part of a server by a list that lags may be a disk to be kept."""
    if one.expires_at:
        return one.expires_at < time.time()
    return not one.server_id

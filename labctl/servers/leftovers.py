"""Find and remove everything with labctl's tag at a provider, recorded on this machine or not."""

from __future__ import annotations

import time
from pathlib import Path

from labctl.errors import PolicyError
from labctl.events import Note, Question, Step, report_wait
from labctl.model import ProviderAccount, Resource, Server, Value
from labctl.retry import poll_until
from labctl.servers import accounts, cost, disks, end_server, pending_attempts
from labctl.servers.context import LabContext
from labctl.servers.open_costs import explain_open_costs
from labctl.text import add_next

# Kind of a resource that is free and makes the next server start faster: it is never removed.
CACHE = "cache"
OTHERS_LOSS = "Runs on them end, and results that were not downloaded are lost. Ask the user first."


class Orphans(Value, frozen=True):
    """What exists at a provider. `here` are the ids of servers that this machine has on record.

    `elsewhere` names what this machine has on record in other accounts of the provider: servers,
    and what interrupted `up`s may have created. `others` are servers of other users who share the
    provider without accounts, as on one Docker Engine. `caches` are free and never removed.
    """

    servers: tuple[Server, ...]
    resources: tuple[Resource, ...]
    here: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    others: tuple[Server, ...] = ()
    caches: tuple[Resource, ...] = ()

    @property
    def is_billing(self) -> bool:
        """Whether anything is left that costs money, or may."""
        paid = any(resource.price_usd_per_month > 0 for resource in self.resources)
        servers = any(server.state != "terminated" for server in self.servers)
        return paid or servers or bool(self.elsewhere)


def find_orphans(context: LabContext) -> Orphans:
    """List what the provider shows. Kept disks are among the resources.

    Warns about what its list cannot show: recent attempts, and resources in other accounts.
    """
    with explain_open_costs(context, every_lab=True):
        _warn(context)
    return _list_shown(context)


def _warn(context: LabContext) -> None:
    for attempt in pending_attempts.list_pending_attempts(context, every_lab=True):
        text = (
            f"an interrupted `up` of {attempt.request.lab} may have created a server that "
            f"{context.provider.name} does not list yet: try again in a minute"
        )
        context.reporter.emit(Note(text=text, level="warning"))
    for name, account_id in _list_elsewhere(context).items():
        profile = accounts.find_profile(context, account_id)
        account = ProviderAccount(id=account_id, profile=profile)
        text = f"{name} belongs to {accounts.describe(context.provider.name, account)}"
        next_ = accounts.switch_command(context, account_id, "labctl orphans")
        context.reporter.emit(Note(text=add_next(text, next_), level="warning"))


def _list_elsewhere(context: LabContext) -> dict[str, str]:
    """List what this machine has on record in other accounts of the provider: name -> account."""
    provider = context.provider.name
    accounts_by_name = {
        f"the server {server.id} of {server.lab}": server.account
        for server in context.state.list_servers()
        if server.provider == provider and server.state not in accounts.ENDED
    }
    accounts_by_name |= {
        f"what an interrupted `up` of {attempt.request.lab} may have created": attempt.account
        for attempt in context.state.list_open_attempts()
        if attempt.provider == provider
    }
    return {
        name: account
        for name, account in accounts_by_name.items()
        if accounts.is_elsewhere(context, account)
    }


def _list_shown(context: LabContext) -> Orphans:
    text = f"listing what labctl created ({context.provider.name})"
    with report_wait(context.reporter, text), explain_open_costs(context, every_lab=True):
        servers = [one for one in context.provider.servers() if one.state != "terminated"]
        others = context.provider.leftovers()
    disks.record_shown(context, others, None)
    ids = {server.id for server in servers}
    resources = [
        one for one in others if one.kind != CACHE and (one.expires_at or one.server_id not in ids)
    ]
    recorded = {server.id for server in context.state.list_servers()}
    own = [one for one in servers if one.id in recorded or _is_own(context, one)]
    return Orphans(
        servers=tuple(own),
        resources=tuple(resources),
        here=tuple(sorted(ids & recorded)),
        elsewhere=tuple(_list_elsewhere(context)),
        others=tuple(one for one in servers if one not in own),
        caches=tuple(one for one in others if one.kind == CACHE),
    )


def _is_own(context: LabContext, server: Server) -> bool:
    """Whether this user created it, as far as the provider can tell its users apart.

    A login name is not enough: in containers that share an engine, everybody may be root. The key
    of a server is in the directory of the user who created it.
    """
    if not server.owner:
        return True
    return Path(server.endpoint.identity).is_relative_to(context.paths.keys_dir.parent)


def end_orphans(context: LabContext, listed: Orphans, *, kept_too: bool) -> Orphans:
    """Terminate and remove what was listed; return what is left. Results on it are lost.

    Disks that were kept for their data are removed once they have expired, and before that only
    with `kept_too`. PolicyError if the user does not confirm.
    """
    listed = _wait_for_attempts(context, listed)
    removable = [resource for resource in listed.resources if kept_too or _is_unneeded(resource)]
    if not listed.servers and not removable:
        return listed
    names = {server.lab for server in listed.servers}
    names |= {resource.lab or resource.lab_id for resource in removable}
    labs = ", ".join(sorted(names - {""}))
    decision = Question(
        question=f"terminate {len(listed.servers)} servers and remove {len(removable)} other "
        "resources?",
        detail=f"labs: {labs}\nResults that are only there are lost; labctl down saves them first.",
    )
    if not context.reporter.confirm(decision):
        raise PolicyError(
            "nothing was terminated",
            why="it was not confirmed",
            hint="labctl orphans --terminate --yes",
        )
    for server in listed.servers:
        cost.record_start(context.state, server)
    end_server.end(context, listed.servers)

    def list_removable() -> list[Resource]:
        # Provider lists lag: more servers may appear, and resources that they were using.
        end_server.end(context, _list_shown(context).servers)
        return [one for one in _list_shown(context).resources if kept_too or _is_unneeded(one)]

    end_server.remove_resources(context, list_removable(), list_removable)
    return _list_shown(context)


def end_others(context: LabContext, listed: Orphans) -> Orphans:
    """Terminate the servers of each other user whose name is typed; return what is left."""
    for owner in sorted({server.owner for server in listed.others}):
        servers = [server for server in listed.others if server.owner == owner]
        lines = [f"  {server.id} ({server.lab}, {server.state})" for server in servers]
        decision = Question(
            question=f"to terminate the servers of {owner}, type {owner}",
            detail="\n".join([f"Another user, {owner}, created:", *lines, OTHERS_LOSS]),
            typed=owner,
        )
        if context.reporter.confirm(decision):
            end_server.end(context, servers)
        else:
            context.reporter.emit(Note(text=f"the servers of {owner} were not terminated"))
    return _list_shown(context)


def _wait_for_attempts(context: LabContext, listed: Orphans) -> Orphans:
    """Wait until everything that interrupted `up`s may have created is listed; list again."""
    if not pending_attempts.list_pending_attempts(context, every_lab=True):
        return listed
    context.reporter.emit(Step(name="waiting for what an interrupted `up` may have created"))
    settle_s = context.provider.settle_s
    poll_until(
        lambda: not pending_attempts.list_pending_attempts(context, every_lab=True),
        pause_s=min(1.0, settle_s),
        deadline_s=settle_s,
    )
    return _list_shown(context)


def _is_unneeded(resource: Resource) -> bool:
    """Whether nobody needs it. Lists lag: what seems to be part of a server may be a kept disk."""
    if resource.expires_at:
        return resource.expires_at < time.time()
    return not resource.server_id

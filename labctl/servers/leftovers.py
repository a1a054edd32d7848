"""Find and remove everything with labctl's tag at a provider, recorded on this machine or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from labctl.errors import PolicyError
from labctl.events import Note, Question, Step, report_wait
from labctl.model import ProviderAccount, Resource, Server, Value
from labctl.providers import Marketplace
from labctl.retry import poll_until
from labctl.servers import accounts, cost, disks, end_server, pending_attempts
from labctl.servers.context import LabContext
from labctl.servers.members import ask_each, ask_members
from labctl.servers.open_costs import explain_open_costs
from labctl.servers.provider_choice import select_provider
from labctl.servers.provider_traits import describe_provider
from labctl.state import ledgers
from labctl.text import add_next, count_text, elapsed_text

# Kind of a resource that is free and makes the next server start faster: it is never removed.
CACHE = "cache"
COMMAND = "labctl orphans"
OTHERS_LOSS = "Runs on them end, and results that were not downloaded are lost. Ask the user first."


class Orphans(Value, frozen=True):
    """What exists at a provider. `here` are the ids of servers that this machine has on record.

    `elsewhere` names what this machine has on record in other accounts of the provider: servers,
    and what interrupted `up`s may have created. `others` are servers of other users who share the
    provider without accounts, as on one Docker Engine, or of this user with another home directory.
    `caches` are free and never removed. `failures` says, by provider, why it could not be asked:
    what it has is not in this list. `asked` are the providers that answered. `terminated` and
    `removed` are what was listed before and no longer exists.
    """

    servers: tuple[Server, ...]
    resources: tuple[Resource, ...]
    here: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    others: tuple[Server, ...] = ()
    caches: tuple[Resource, ...] = ()
    failures: dict[str, str] = msgspec.field(default_factory=dict)
    asked: tuple[str, ...] = ()
    terminated: tuple[Server, ...] = ()
    removed: tuple[Resource, ...] = ()

    @property
    def is_billing(self) -> bool:
        """Whether anything is left that costs money, or may."""
        paid = any(resource.price_usd_per_month > 0 for resource in self.resources)
        servers = any(server.state != "terminated" for server in self.servers)
        return paid or servers or bool(self.elsewhere)


def find_orphans(context: LabContext) -> Orphans:
    """List what the provider shows, or all providers of a market. Kept disks are resources.

    Warns about what its list cannot show: recent attempts, and resources in other accounts.
    """

    def warn_and_list(member: LabContext) -> Orphans:
        _warn(member)
        return _list_shown(member)

    return _list_all(context, warn_and_list)


def _list_all(context: LabContext, list_one: Callable[[LabContext], Orphans]) -> Orphans:
    """Return the lists of all providers behind a market as one."""
    with explain_open_costs(context, every_lab=True):
        answers = ask_members(context, list_one)
    lists = answers.by_provider.values()
    return Orphans(
        servers=tuple(one for each in lists for one in each.servers),
        resources=tuple(one for each in lists for one in each.resources),
        here=tuple(sorted(one for each in lists for one in each.here)),
        elsewhere=tuple(one for each in lists for one in each.elsewhere),
        others=tuple(one for each in lists for one in each.others),
        caches=tuple(one for each in lists for one in each.caches),
        failures=answers.failures,
        asked=tuple(answers.by_provider),
    )


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
    text = f"listing what labctl created ({describe_provider(context.provider)})"
    with report_wait(context.reporter, text):
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

    The key of a server is in the directory of the user who created it. Image caches are kept apart
    by the same directory, as `ProviderContext.home`.
    """
    if not server.owner:
        return True
    return Path(server.endpoint.identity).is_relative_to(context.owner_home)


def end_orphans(context: LabContext, listed: Orphans, *, kept_too: bool) -> Orphans:
    """Terminate and remove what was listed; return what is left. Results on it are lost.

    Disks that were kept for their data are removed once they have expired, and before that only
    with `kept_too`. PolicyError if the user does not confirm. One provider of a market that fails
    is a warning, and the others are handled.
    """
    if any(ask_members(context, _wait_for_attempts).by_provider.values()):
        listed = _list_all(context, _list_shown)
    removable = [resource for resource in listed.resources if kept_too or _is_unneeded(resource)]
    if not listed.servers and not removable:
        return listed
    _confirm(context, listed.servers, removable)
    _end_listed(context, listed.servers, removable, kept_too=kept_too)
    left = _list_all(context, _list_shown)
    return _note_ended(listed, left, listed.servers, removable)


def _end_listed(
    context: LabContext,
    servers: Sequence[Server],
    removable: Sequence[Resource],
    *,
    kept_too: bool,
) -> None:
    """Terminate and remove at each provider; one of a market that fails is a warning."""

    def end_part(member: LabContext) -> None:
        name = member.provider.name
        own = [server for server in servers if server.provider == name]
        _end_all(member, own, kept_too=kept_too)

    names = {server.provider for server in servers}
    names |= {resource.provider for resource in removable}
    if not isinstance(context.provider, Marketplace):
        end_part(context)
        return
    for name, why in ask_each(context, sorted(names), end_part).failures.items():
        text = add_next(f"{name}: {why}", f"labctl orphans --provider {name} --terminate")
        context.reporter.emit(Note(text=text, level="warning"))


def _note_ended(
    before: Orphans,
    after: Orphans,
    ended: Sequence[Server],
    removed: Sequence[Resource] = (),
) -> Orphans:
    """Return `after` with which of the `ended` servers and `removed` resources are gone."""
    left = {server.id for server in (*after.servers, *after.others)}
    kept = {resource.id for resource in after.resources}
    return msgspec.structs.replace(
        after,
        terminated=(*before.terminated, *(one for one in ended if one.id not in left)),
        removed=(*before.removed, *(one for one in removed if one.id not in kept)),
    )


def describe_server(context: LabContext, server: Server) -> str:
    """Name a server with its lab, its state, and the runs that this machine knows on it."""
    active = [
        f"run {run.id} was {run.state} {_age_text(run.seen_at or run.created_at)}"
        for run in context.state.list_runs(server.lab_id)
        if run.server_id == server.id and not run.has_ended
    ]
    is_recorded = context.state.get_server(server.id) is not None
    unknown = "no active run on record" if is_recorded else "its runs are not on record here"
    return f"{server.id} ({server.lab}, {server.state}): {', '.join(active) or unknown}"


def _age_text(moment: float) -> str:
    return f"{elapsed_text(time.time() - moment)} ago"


def _confirm(context: LabContext, servers: Sequence[Server], removable: Sequence[Resource]) -> None:
    lines = [f"  {describe_server(context, server)}" for server in servers]
    lines += [
        f"  {resource.kind} {resource.id} ({resource.lab or resource.lab_id or 'of no lab'})"
        for resource in removable
    ]
    other = "other resource" if servers else "resource"
    actions = [
        *([f"terminate {count_text(len(servers), 'server')}"] if servers else []),
        *([f"remove {count_text(len(removable), other)}"] if removable else []),
    ]
    decision = Question(
        question=f"{' and '.join(actions)}?",
        detail="\n".join(
            [*lines, "Results found only there are lost; labctl down saves them first."]
        ),
    )
    if not context.reporter.confirm(decision):
        raise PolicyError(
            "nothing was terminated",
            why="you did not confirm",
            hint="labctl orphans   # lists the servers and resources",
        )


def _end_all(context: LabContext, servers: Sequence[Server], *, kept_too: bool) -> None:
    """Terminate these servers of one provider, and remove what is not needed there."""
    for server in servers:
        cost.record_start(context.state, server)
        detail = {"by": COMMAND}
        context.state.record(
            ledgers.PUT_DOWN, lab_id=server.lab_id, server_id=server.id, detail=detail
        )
    end_server.end(context, servers, by=COMMAND)

    def list_removable() -> list[Resource]:
        # Provider lists lag: more servers may appear, and resources that they were using.
        end_server.end(context, _list_shown(context).servers, by=COMMAND)
        return [one for one in _list_shown(context).resources if kept_too or _is_unneeded(one)]

    end_server.remove_resources(context, list_removable(), list_removable)


def end_others(context: LabContext, listed: Orphans) -> Orphans:
    """Terminate the servers of each other user whose name is typed; return what is left."""
    ended: list[Server] = []
    for provider, owner in sorted({(server.provider, server.owner) for server in listed.others}):
        servers = [one for one in listed.others if (one.provider, one.owner) == (provider, owner)]
        lines = [f"  {describe_server(context, server)}" for server in servers]
        decision = Question(
            question=f"to terminate the servers of {owner}, type {owner}",
            detail="\n".join([f"{_describe_creator(context, owner)}:", *lines, OTHERS_LOSS]),
            typed=owner,
        )
        if context.reporter.confirm(decision):
            end_server.end(select_provider(context, provider), servers, by=COMMAND)
            ended += servers
        else:
            context.reporter.emit(Note(text=f"the servers of {owner} were not terminated"))
    return _note_ended(listed, _list_all(context, _list_shown), ended)


def _describe_creator(context: LabContext, owner: str) -> str:
    if owner == context.owner_name:
        return f"{owner}, your login name too, created with another home directory"
    return f"Another user, {owner}, created"


def _wait_for_attempts(context: LabContext) -> bool:
    """Wait until everything that interrupted `up`s may have created is listed, if anything may."""
    if not pending_attempts.list_pending_attempts(context, every_lab=True):
        return False
    context.reporter.emit(Step(name="waiting for what an interrupted `up` may have created"))
    settle_s = context.provider.settle_s
    poll_until(
        lambda: not pending_attempts.list_pending_attempts(context, every_lab=True),
        pause_s=min(1.0, settle_s),
        deadline_s=settle_s,
    )
    return True


def _is_unneeded(resource: Resource) -> bool:
    """Whether nobody needs it. Lists lag: what seems to be part of a server may be a kept disk."""
    if resource.expires_at:
        return resource.expires_at < time.time()
    return not resource.server_id

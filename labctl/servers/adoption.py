"""Find a lab's server at its provider, record it, and renew its lease."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from labctl.errors import (
    ConnectError,
    DnsError,
    HostKeyError,
    LabError,
    PolicyError,
    UnreachableError,
    UsageError,
)
from labctl.model import Server
from labctl.providers import (
    Explains,
    Joinable,
    Leasable,
    SubmitsJobs,
    get_provider_class,
)
from labctl.retry import poll_until
from labctl.servers import accounts, cost, gang
from labctl.servers.context import LabContext
from labctl.servers.members import list_servers
from labctl.text import price_text

POLL_S = 0.25
# seconds that a shared machine is leased without `ttl`, counted from the last run
LEASE_S = 24 * 3600


def adopt(context: LabContext, listed: Sequence[Server] | None = None) -> Server | None:
    """Find the lab's server at its provider and record it; None if the lab has no server.

    `listed` is the provider's list of servers, if the caller has just fetched it. Another process
    may create, or get ready, the lab's server meanwhile: its newer record stays. PolicyError if the
    recorded server belongs to another provider or account: only there can its state be found out.
    """
    before = {server.id: server for server in context.state.list_servers(context.lab_id)}
    recorded = require_recorded_provider(context)
    servers, open_attempts = context.state.list_servers, context.state.list_open_attempts
    accounts.require_same_account(context, servers(context.lab_id), open_attempts(context.lab_id))
    server = _find_recorded(context, recorded) if recorded else None
    if server is None:
        every = list_servers(context) if listed is None else listed
        others = _list_other_parts(context, before.values())
        ours = [s for s in every if s.lab_id == context.lab_id and s.id not in others]
        alive = [s for s in ours if s.state not in accounts.ENDED]
        server = alive[0] if alive else None
    _drop_ended(context, server)
    if server is None:
        return None
    server = context.assign_alias(server, recorded)
    server = context.state.update_server(before.get(server.id), server)
    if server.account:
        with suppress(LabError):  # it only makes a later refusal more helpful
            accounts.note_profile(context, context.provider.get_account())
    cost.record_start(context.state, server)
    for attempt in context.state.list_open_attempts(context.lab_id):
        if attempt.request.moving == context.moving:
            context.state.end_attempt(attempt.token, "adopted")
    return server


def require_recorded_provider(context: LabContext) -> Server | None:
    """Return the lab's recorded server, None without one; PolicyError if its provider is another.

    Only at that provider can the server's state be found out. This uses no network.
    """
    recorded = context.state.get_lab_server(context.lab_id, context.moving)
    if recorded is not None and recorded.provider != context.provider.name:
        raise _make_other_provider_error(context, recorded)
    return recorded


def _list_other_parts(context: LabContext, recorded: Iterable[Server]) -> set[str]:
    """List the servers that this context must leave alone: their part in the lab's move is another.

    A lab without a server of its own takes what a move has left: nothing else would use it.
    """
    if not context.moving:
        return set()
    return {server.id for server in recorded if server.moving != context.moving}


def can_join(provider: str) -> bool:
    """Whether the provider with this name may have a server that `up` would join."""
    with suppress(UsageError):  # the provider is not installed
        return issubclass(get_provider_class(provider), Joinable)
    return False


def find_joinable(context: LabContext) -> Server | None:
    """Return the running server that `up` would join although another lab holds it; else None."""
    provider = context.provider
    return provider.find_joinable() if isinstance(provider, Joinable) else None


def _make_other_provider_error(context: LabContext, recorded: Server) -> PolicyError:
    name, file = context.provider.name, context.subject.config_file
    price = recorded.offer.price_usd_per_hour
    bills = f" at {price_text(price)}" if price else ""
    chosen_by = context.config.origins.get("server.provider", "").partition(":")[0] or file
    set_in_file = f"set `server: {{provider: {recorded.provider}}}` in {file}, then:\n"
    return PolicyError(
        lambda subject: (
            f"the server of {context.name_for(subject)} is at {recorded.provider}, not at {name}"
        ),
        why=f"{chosen_by} now selects {name}, but {recorded.id} is still running{bills}",
        hint=lambda subject: (set_in_file if chosen_by == file else "") + subject.down,
        subject=context.subject,
    )


def _drop_ended(context: LabContext, alive: Server | None) -> None:
    """Drop ended servers from the record; one that is still ending stays until it has ended."""
    for recorded in context.state.list_servers(context.lab_id):
        if recorded.provider != context.provider.name or (alive and recorded.id == alive.id):
            continue
        if recorded.moving != context.moving:
            continue
        shown = context.provider.find(recorded.id)
        if shown is None and not _is_gone(context, recorded, alive):
            continue
        if alive is None and shown is not None and shown.state not in accounts.ENDED:
            continue  # another process has just created it
        context.connections.close(recorded)
        context.connections.forget(recorded.id)  # the next server gets its name for ssh
        if shown is not None and shown.state != "terminated":
            context.state.save_server(msgspec.structs.replace(recorded, state=shown.state))
            continue
        context.state.drop_server(recorded.id)
        why = explain_end(context, recorded.id)
        detail = {"why": why} if why else {}
        context.state.record("gone", lab_id=context.lab_id, server_id=recorded.id, detail=detail)
    context.connections.forget_unrecorded(
        lambda: [server.id for server in context.state.list_servers()]
    )


def explain_end(context: LabContext, server_id: str) -> str:
    """Return why a server has ended, as its provider says; "" if it does not."""
    provider = context.provider
    return provider.explain_end(server_id) if isinstance(provider, Explains) else ""


def _is_gone(context: LabContext, recorded: Server, alive: Server | None) -> bool:
    """Whether a server has ended. If the lab has a live one, an unknown account raises no error."""
    costs = bool(recorded.offer.price_usd_per_hour)
    if alive and not accounts.is_attributed(context, recorded.account, costs=costs):
        return False
    return accounts.is_gone(context, recorded)


def _find_recorded(context: LabContext, recorded: Server) -> Server | None:
    """Find a recorded server at its provider; HostKeyError if its host key is not pinned."""
    settle_s = context.provider.settle_s
    try:
        shown = poll_until(
            lambda: context.provider.find(recorded.id),
            pause_s=POLL_S,
            # At most `settle_s`: by this machine's clock the server may be from the future.
            deadline_s=min(settle_s, recorded.created_at + settle_s - time.time()),
        )
    except ConnectError as error:
        suggest_other_machine(context, error)
        raise
    if shown is None or shown.state in accounts.ENDED:
        return None
    # Read again: another process may just have replaced the server's first host key.
    newest = context.state.get_server(recorded.id) or recorded
    pinned, presented = _host_keys(newest), _host_keys(shown)
    if pinned and presented and not pinned & presented:
        raise HostKeyError(
            f"the host key of the server {recorded.id} is not the one that was pinned",
            why="the machine was replaced, or something intercepts the connection",
            hint=f"{context.subject.down} --discard removes it",
        )
    return shown


def _host_keys(server: Server) -> set[str]:
    return {server.endpoint.host_key, server.endpoint.next_host_key} - {""}


def is_fresh(context: LabContext, server: Server) -> bool:
    """Whether it was created here and never became ready, so it cannot hold any results."""
    created = context.state.list_events(server_id=server.id, kind="created", limit=1)
    return bool(created) and not context.state.list_events(
        server_id=server.id, kind="ready", limit=1
    )


def is_leased(context: LabContext) -> bool:
    """Whether other users get the lab's server after this one, as with a leased machine."""
    return isinstance(context.provider, Leasable)


def is_shared_with_others(context: LabContext) -> bool:
    """Whether the machine stays, with the user's other files, after the lab has left it."""
    return is_leased(context) or isinstance(context.provider, SubmitsJobs)


def is_leased_by(provider: str) -> bool:
    """Whether the servers of the provider with this name are leased machines.

    Not if the provider is not installed (any more).
    """
    with suppress(UsageError):
        return issubclass(get_provider_class(provider), Leasable)
    return False


def suggest_other_machine(context: LabContext, error: LabError) -> None:
    """Have the error of a leased machine that does not answer say how to use another one.

    Other errors, such as that of a jump host, have a better next step.
    """
    if isinstance(error, DnsError | UnreachableError) and is_leased(context):
        error.hint = lambda subject: (
            f"{subject.up}   # after the machine answers again; or, to use another machine:\n"
            f"{subject.down} --discard   # gives up its results that you have not downloaded"
        )


def describe_down(context: LabContext) -> str:
    """Say in a few words what `labctl down` does with the lab's servers."""
    if isinstance(context.provider, SubmitsJobs):
        return "cancel your jobs"
    has_several = gang.has_several_servers(context)
    if is_leased(context):
        return "end your leases" if has_several else "end your lease"
    return "remove the servers" if has_several else "remove the server"


def renew(context: LabContext, server: Server) -> None:
    """Restart the lease of a provider that has leases, since the server is in use."""
    if not isinstance(context.provider, Leasable):
        return
    if context.provider.extend(server.id, context.config.server.need.ttl_s or LEASE_S) is None:
        raise PolicyError(
            lambda subject: f"{context.name_for(subject)} is no longer leased to you",
            why="its lease ended, and another user may have it now",
            hint=lambda subject: subject.up,
            subject=context.subject,
        )

"""Remove what a lab has at its provider, and report what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from labctl.config.member_ids import list_lab_ids
from labctl.errors import BusyError, ConnectError, HostKeyError, LabError, ThrottledError
from labctl.events import report_wait
from labctl.model import Resource, Server, Value
from labctl.retry import poll_until, retry_on, retry_throttled_calls
from labctl.servers import accounts, adoption, disk_retention, disks, kept_disks
from labctl.servers.context import LabContext
from labctl.servers.provider_traits import describe_provider
from labctl.state.disks import is_expired
from labctl.text import duration_text, names_text

T = TypeVar("T")
# AWS takes several minutes to terminate some machines with GPUs.
GONE_DEADLINE_S = 300.0
RELEASE_DEADLINE_S = 120.0
AT_ONCE = 32
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


class Removal(Value, frozen=True):
    """What is left after `remove`: nothing, if both are empty apart from caches."""

    server_id: str
    survivors: tuple[Server, ...] = ()
    leftovers: tuple[Resource, ...] = ()


def remove(context: LabContext, server: Server, *, keep_disks: bool = False) -> Removal:
    """Terminate a server, wait until the provider confirms it, then remove everything else.

    Safe to repeat. `keep_disks` as in `end`. BusyError if the provider does not confirm in time;
    the server then stays on record.
    """
    end(context, [server], keep_disks=keep_disks)
    return sweep(context, server.id)


def sweep(context: LabContext, server_id: str = "") -> Removal:
    """Remove everything of the lab except servers, if none is alive; return what is left.

    A kept disk stays until it expires, unless everything on it has been downloaded. Of a lab with
    several servers, everything stays while another one is alive, since they share it.
    """
    name = f"checking what is left ({describe_provider(context.provider)})"
    with report_wait(context.reporter, name):
        servers = context.provider.servers()
    if context.rank == 0 and has_siblings(context, servers):
        return Removal(server_id=server_id)
    ours = [s for s in servers if s.lab_id == context.lab_id]
    ending = [s for s in ours if s.state == "ending"]
    _wait_for(context, ending)
    with report_wait(context.reporter, name):
        return _sweep_resources(context, server_id, [s for s in ours if s not in ending])


def has_siblings(context: LabContext, servers: Iterable[Server]) -> bool:
    """Whether another server of the same lab is alive."""
    others = set(list_lab_ids(context.lab_id)) - {context.lab_id}
    return any(one.lab_id in others and one.state not in accounts.ENDED for one in servers)


def _sweep_resources(context: LabContext, server_id: str, ours: list[Server]) -> Removal:
    survivors = tuple(s for s in ours if s.state != "terminated")
    if not survivors:
        resources = [r for r in context.provider.leftovers() if r.lab_id == context.lab_id]
        # Provider lists lag: what still seems to belong to a server may be a disk to be kept.
        free = [r for r in resources if not (r.expires_at or r.server_id)]
        unneeded = free + [r for r in resources if r.expires_at and kept_disks.is_saved(context, r)]
        expired = [r for r in resources if is_expired(r) and r not in unneeded]
        remove_resources(context, unneeded + expired)
        for disk in expired:
            disks.notify_removed(context, disk)
    leftovers = context.provider.leftovers()
    disks.record_shown(context, leftovers, context.lab_id)
    return Removal(
        server_id=server_id,
        survivors=survivors,
        leftovers=tuple(r for r in leftovers if r.lab_id in ("", context.lab_id)),
    )


def end(
    context: LabContext, servers: Iterable[Server], *, keep_disks: bool = False, by: str = ""
) -> None:
    """Terminate all of these servers, wait until the provider confirms it, drop their records.

    Their disks are deleted too, except with `keep_disks` those that the provider has been asked to
    keep. `by` is the command that `labctl status` names as the reason. PolicyError, and no server
    is terminated, if one belongs to another account.
    """
    waiting = list(servers)
    accounts.require_same_account(context, waiting)

    def terminate(server: Server) -> None:
        context.connections.close(server)
        if not keep_disks:
            disk_retention.release(context, server)
        retry_throttled_calls()(context.provider.terminate, server.id)
        context.state.record("terminating", lab_id=server.lab_id, server_id=server.id)
        if (recorded := context.state.get_server(server.id)) is not None:
            # What the next command reads, should this one be interrupted before the confirmation.
            context.state.save_server(msgspec.structs.replace(recorded, state="ending"))

    with report_wait(context.reporter, f"removing {_name_servers(waiting)}"):
        _map_parallel(terminate, waiting)
    _wait_for(context, waiting, by)


def _map_parallel(action: Callable[[Server], T], servers: list[Server]) -> list[T]:
    """Call `action` for every server in AT_ONCE threads, so that providers can batch requests."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(action, servers))


def _name_servers(servers: list[Server]) -> str:
    return names_text([server.alias or server.id for server in servers], 3)


def _wait_for(context: LabContext, waiting: list[Server], by: str = "") -> None:
    """Wait until the provider confirms the end of each; repeat a request that it may have missed.

    BusyError after GONE_DEADLINE_S.
    """
    if not waiting:
        return
    text = f"waiting for {context.provider.name} to end {_name_servers(waiting)}"
    limit = f"at most {duration_text(GONE_DEADLINE_S)}"
    with report_wait(context.reporter, text, limit):
        _poll_until_gone(context, waiting, by)


def _poll_until_gone(context: LabContext, waiting: list[Server], by: str) -> None:
    def are_gone() -> bool:
        nonlocal waiting
        waiting = _not_gone(context, waiting, by)
        return not waiting

    if poll_until(
        are_gone,
        pause_s=FIRST_PAUSE_S,
        longest_pause_s=LONGEST_PAUSE_S,
        deadline_s=GONE_DEADLINE_S,
    ):
        return
    shown = context.provider.find(waiting[0].id)
    if shown is not None:
        context.state.save_server(context.assign_alias(shown, waiting[0]))
    state = shown.state if shown else "not listed"
    raise BusyError(
        f"{context.provider.name} has not confirmed that {waiting[0].id} is terminated",
        why=f"its last state is: {state}; until it is terminated it may cost money",
        hint=context.subject.down,
    )


def _not_gone(context: LabContext, waiting: list[Server], by: str) -> list[Server]:
    remaining = _map_parallel(partial(_check_gone, context, by=by), waiting)
    return [server for server in remaining if server is not None]


def _check_gone(context: LabContext, server: Server, *, by: str) -> Server | None:
    """Return the server, "ending" once its provider shows that state; None once it is gone."""
    shown = retry_throttled_calls()(context.provider.find, server.id)
    if shown is not None and shown.state != "terminated":
        if shown.state != "ending":
            # A request from before the provider showed the server may have been lost.
            retry_throttled_calls()(context.provider.terminate, server.id)
            return server
        return msgspec.structs.replace(server, state="ending")
    if shown is None and not accounts.is_gone(context, server):
        return server
    context.state.drop_server(server.id)
    context.connections.forget(server.id)
    detail = {"why": _describe_end(by, time.time())} if by else {}
    context.state.record("terminated", lab_id=server.lab_id, server_id=server.id, detail=detail)
    return None


def _describe_end(by: str, at: float) -> str:
    """Say which command terminated a server, and when (Unix seconds)."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    return f"`{by}` terminated it at {when}"


def remove_or_drop(context: LabContext, server: Server, *, discard: bool) -> Removal | LabError:
    """Remove the server. Return the error if only its record was removed.

    That is so for a leased machine that does not answer or has another host key, on `discard`:
    nothing can be sent to it, and its lease ends by itself.
    """
    try:
        return remove(context, server)
    except (ConnectError, HostKeyError) as error:
        if not (discard and adoption.is_shared_with_others(context)):
            raise
        _drop_leased_machine(context, server, error)
        return error


def _drop_leased_machine(context: LabContext, server: Server, error: LabError) -> None:
    """Drop the record of a leased machine that could not be released because of `error`.

    If it has another host key, drop the key that was confirmed, too: the next `up` shows the new
    one and asks about it.
    """
    context.state.drop_server(server.id)
    context.connections.forget(server.id)
    why = "it could not be reached, and its record was dropped"
    if isinstance(error, HostKeyError):
        context.connections.forget_confirmed_key(server.endpoint)
        why = "its host key changed, and its record was dropped"
    detail = {"why": why}
    context.state.record("gone", lab_id=server.lab_id, server_id=server.id, detail=detail)


def remove_resources(
    context: LabContext,
    resources: Iterable[Resource],
    again: Callable[[], Iterable[Resource]] | None = None,
) -> None:
    """Remove all resources; retry those that something still uses for RELEASE_DEADLINE_S.

    `again` lists the resources before each retry, since new ones may have appeared meanwhile.
    BusyError names what is left after the deadline.
    """
    remaining = list(resources)
    policy = retry_on(
        (BusyError, ThrottledError),
        pause_s=FIRST_PAUSE_S,
        longest_pause_s=LONGEST_PAUSE_S,
        deadline_s=RELEASE_DEADLINE_S,
    )
    for attempt in policy:
        with attempt:
            if again is not None and attempt.retry_state.attempt_number > 1:
                remaining = list(again())
            in_use = [(one, error) for one in remaining if (error := _try_to_remove(context, one))]
            remaining = [one for one, _ in in_use]
            if in_use:
                raise BusyError(
                    f"{remaining[0].kind} {remaining[0].id} could not be removed",
                    why=str(in_use[0][1]),
                    hint="labctl orphans --terminate",
                )


def _try_to_remove(context: LabContext, resource: Resource) -> LabError | None:
    """Remove a resource; return the error if something still uses it, or the provider is busy."""
    try:
        context.provider.remove(resource)
    except (BusyError, ThrottledError) as error:
        return error
    disks.record_removed(context, resource)
    return None

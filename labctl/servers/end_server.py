"""Taking away what a lab has at its provider, and asking the provider what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from labctl.errors import BusyError, LabError, ThrottledError
from labctl.events import Step
from labctl.model import Resource, Server, Value
from labctl.retry import retry_on, while_throttled
from labctl.servers import accounts, disks, held_disks, kept_disks
from labctl.servers.context import Ground
from labctl.state.disks import is_expired

T = TypeVar("T")
# AWS takes up to some minutes to end a machine with GPUs.
GONE_DEADLINE_S = 300.0
RELEASE_DEADLINE_S = 120.0
AT_ONCE = 32
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


class Removal(Value, frozen=True):
    """What `remove` left behind: nothing, if both are empty but for caches."""

    server_id: str
    survivors: tuple[Server, ...] = ()
    leftovers: tuple[Resource, ...] = ()


def remove(ground: Ground, server: Server, *, keep_disks: bool = False) -> Removal:
    """Terminate, wait for the provider's word, forget; then take away the rest. Safe to repeat.

    `keep_disks` as in `end`. BusyError where the provider does not confirm in time: the record
    stays.
    """
    end(ground, [server], keep_disks=keep_disks)
    return swept(ground, server.id)


def swept(ground: Ground, server_id: str = "") -> Removal:
    """What is left of the lab once everything besides servers was taken away.

    A kept disk stays until its time is over, unless everything on it is home.
    """
    ours = [s for s in ground.provider.servers() if s.lab_id == ground.lab_id]
    ending = [s for s in ours if s.state == "ending"]
    _wait_for(ground, ending)
    ours = [s for s in ours if s not in ending]
    survivors = tuple(s for s in ours if s.state != "terminated")
    if not survivors:
        mine = [r for r in ground.provider.leftovers() if r.lab_id == ground.lab_id]
        # What still belongs to a server by a list that lags may be a disk that is to outlive it.
        free = [r for r in mine if not (r.expires_at or r.server_id)]
        over = free + [r for r in mine if r.expires_at and kept_disks.is_saved(ground, r)]
        expired = [r for r in mine if is_expired(r) and r not in over]
        take_away(ground, over + expired)
        for disk in expired:
            disks.tell_removed(ground, disk)
    left = ground.provider.leftovers()
    disks.looked(ground, left, ground.lab_id)
    return Removal(
        server_id=server_id,
        survivors=survivors,
        leftovers=tuple(r for r in left if r.lab_id in ("", ground.lab_id)),
    )


def end(ground: Ground, servers: Iterable[Server], *, keep_disks: bool = False) -> None:
    """Terminate all of them, then wait until the provider confirms each; their records go then.

    Their disks go too, unless `keep_disks`: then those stay that the provider was told to keep.
    PolicyError, and nothing is ended, where one belongs to another account.
    """
    waiting = list(servers)
    accounts.require_same_account(ground, waiting)

    def order(server: Server) -> None:
        ground.connections.close(server)
        if not keep_disks:
            held_disks.release(ground, server)
        while_throttled()(ground.provider.terminate, server.id)
        ground.state.record("terminating", lab_id=server.lab_id, server_id=server.id)

    _at_once(order, waiting)
    _wait_for(ground, waiting)


def _at_once(deed: Callable[[Server], T], servers: list[Server]) -> list[T]:
    """`deed` for every server, some at a time: what providers send together comes together."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(deed, servers))


def _wait_for(ground: Ground, waiting: list[Server]) -> None:
    """Until the provider says of each that it is gone; it may have missed the first order."""
    deadline = time.monotonic() + GONE_DEADLINE_S
    pause_s = FIRST_PAUSE_S
    told = time.monotonic() + 2.0
    while waiting := _not_gone(ground, waiting):
        if time.monotonic() > deadline:
            found = ground.provider.find(waiting[0].id)
            if found is not None:
                ground.state.save_server(ground.as_ours(found, waiting[0]))
            raise BusyError(
                f"{ground.provider.name} has not confirmed that {waiting[0].id} is gone",
                why=f"it says: {found.state if found else 'not shown'}; what is not gone may bill",
                hint="labctl down",
            )
        if told and time.monotonic() > told:
            ground.reporter.emit(Step(name=f"waiting until {ground.provider.name} says it is gone"))
            told = 0.0
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _not_gone(ground: Ground, waiting: list[Server]) -> list[Server]:
    left = _at_once(partial(_unless_gone, ground), waiting)
    return [server for server in left if server is not None]


def _unless_gone(ground: Ground, server: Server) -> Server | None:
    """The server, "ending" once its provider has shown that; None when it is gone."""
    found = while_throttled()(ground.provider.find, server.id)
    if found is not None and found.state != "terminated":
        if found.state != "ending":
            # An order given while the provider did not show it yet may have gone astray.
            while_throttled()(ground.provider.terminate, server.id)
            return server
        return msgspec.structs.replace(server, state="ending")
    if found is None and not accounts.is_gone(ground, server):
        return server
    ground.state.drop_server(server.id)
    ground.connections.forget(server.id)
    ground.state.record("terminated", lab_id=server.lab_id, server_id=server.id)
    return None


def take_away(
    ground: Ground,
    resources: Iterable[Resource],
    again: Callable[[], Iterable[Resource]] | None = None,
) -> None:
    """Remove them all; one that something else still holds is tried again for a while.

    `again` says what there is then: whoever holds it may have shown itself meanwhile. BusyError
    names what is left when the time is over.
    """
    left = list(resources)
    policy = retry_on(
        (BusyError, ThrottledError),
        pause_s=FIRST_PAUSE_S,
        longest_pause_s=LONGEST_PAUSE_S,
        deadline_s=RELEASE_DEADLINE_S,
    )
    for attempt in policy:
        with attempt:
            if again is not None and attempt.retry_state.attempt_number > 1:
                left = list(again())
            held = [(one, error) for one in left if (error := _try_to_remove(ground, one))]
            left = [one for one, _ in held]
            if held:
                raise BusyError(
                    f"{left[0].kind} {left[0].id} could not be removed",
                    why=str(held[0][1]),
                    hint="labctl orphans --terminate",
                )


def _try_to_remove(ground: Ground, resource: Resource) -> LabError | None:
    """Why it cannot be removed yet, if it cannot."""
    try:
        ground.provider.remove(resource)
    except (BusyError, ThrottledError) as error:
        return error
    disks.removed(ground, resource)
    return None

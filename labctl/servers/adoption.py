"""The server that a lab has, as its provider shows it now, and for how long it is the lab's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from labctl.errors import HostKeyError, LabError, PolicyError
from labctl.model import Server
from labctl.providers import Explains, Lease
from labctl.servers import accounts, cost
from labctl.servers.context import Ground

POLL_S = 0.25
# How long a machine that others share is held without `ttl`, counted from the last run.
LEASE_S = 24 * 3600


def adopt(ground: Ground, listed: Sequence[Server] | None = None) -> Server | None:
    """The lab's server as its provider knows it, recorded again; None where there is none.

    PolicyError where the one on record is another provider's or in another account: only that one
    can say what became of it.
    """
    known = ground.state.server_of_lab(ground.lab_id)
    if known is not None and known.provider != ground.provider.name:
        raise _of_another(ground, known)
    servers, open_attempts = ground.state.servers, ground.state.open_attempts
    accounts.require_same_account(ground, servers(ground.lab_id), open_attempts(ground.lab_id))
    found = _as_provided(ground, known) if known else None
    if found is None:
        every = ground.provider.servers() if listed is None else listed
        ours = [s for s in every if s.lab_id == ground.lab_id]
        alive = [s for s in ours if s.state not in accounts.ENDED]
        found = alive[0] if alive else None
    _drop_ended(ground, found)
    if found is None:
        return None
    found = ground.as_ours(found, known)
    ground.state.save_server(found)
    if found.account:
        with suppress(LabError):  # it only makes a later refusal more helpful
            accounts.note_profile(ground, ground.provider.get_account())
    cost.note_life(ground.state, found)
    for token in [attempt.token for attempt in ground.state.open_attempts(ground.lab_id)]:
        ground.state.end_attempt(token, "adopted")
    return found


def _of_another(ground: Ground, known: Server) -> PolicyError:
    file, name = ground.config.path.name or "lab.yaml", ground.provider.name
    price = known.offer.price_usd_per_hour
    bills = f", at {price:.2f} dollars an hour" if price else ""
    return PolicyError(
        f"{ground.config.name} has a server at {known.provider}, where nobody looks now",
        why=f"{file} says {name} by now; {known.id} goes on{bills}",
        hint=f"server: {{provider: {known.provider}}} in {file}, then labctl down",
    )


def _drop_ended(ground: Ground, alive: Server | None) -> None:
    """Forget what has ended; what is still ending stays on record until it has."""
    for known in ground.state.servers(ground.lab_id):
        if known.provider != ground.provider.name or (alive and known.id == alive.id):
            continue
        found = ground.provider.find(known.id)
        if found is None and not _is_gone(ground, known, alive):
            continue
        ground.connections.close(known)
        ground.connections.forget(known.id)  # its name for ssh is the next one's
        if found is not None and found.state != "terminated":
            ground.state.save_server(msgspec.structs.replace(known, state=found.state))
            continue
        ground.state.drop_server(known.id)
        why = ground.provider.why_ended(known.id) if isinstance(ground.provider, Explains) else ""
        detail = {"why": why} if why else {}
        ground.state.record("gone", lab_id=ground.lab_id, server_id=known.id, detail=detail)
    ground.connections.forget_others(lambda: [one.id for one in ground.state.servers()])


def _is_gone(ground: Ground, known: Server, alive: Server | None) -> bool:
    """Beside a server that lives, one whose account nobody knows just stays on record."""
    costs = bool(known.offer.price_usd_per_hour)
    if alive and not accounts.is_attributed(ground, known.account, costs=costs):
        return False
    return accounts.is_gone(ground, known)


def _as_provided(ground: Ground, known: Server) -> Server | None:
    """What the provider says of a server we know; its pinned key must be the one we know."""
    deadline = known.created_at + ground.provider.settle_s
    while True:
        found = ground.provider.find(known.id)
        if found is not None and found.state not in accounts.ENDED:
            break
        if found is not None or time.time() > deadline:
            return None
        time.sleep(POLL_S)
    pinned, seen = _keys(known), _keys(found)
    if pinned and seen and not pinned & seen:
        raise HostKeyError(
            f"the server {known.id} shows another host key than the one that was pinned",
            why="it was replaced, or somebody stands in between",
            hint="labctl down --discard removes it",
        )
    return found


def _keys(server: Server) -> set[str]:
    return {server.endpoint.host_key, server.endpoint.next_host_key} - {""}


def is_fresh(ground: Ground, server: Server) -> bool:
    """Whether it was made here and was never ready: it can hold nothing that anybody wants."""
    made = ground.state.events(server_id=server.id, kind="created", limit=1)
    return bool(made) and not ground.state.events(server_id=server.id, kind="ready", limit=1)


def renew(ground: Ground, server: Server) -> None:
    """Count a provider's own deadline from now on, since somebody is at work."""
    if not isinstance(ground.provider, Lease):
        return
    if ground.provider.extend(server.id, ground.config.server.need.ttl_s or LEASE_S) is None:
        raise PolicyError(
            f"{server.alias} is not yours any more",
            why="its lease ended, and somebody else may have it",
            hint="labctl up",
        )

"""Getting a server and giving it back. Waiting, adopting and cleaning up live only here."""

from __future__ import annotations

import secrets
import time

import msgspec

from labctl.actions import Decision, Note, Step
from labctl.actions.ground import Ground
from labctl.actions.host_keys import make_key
from labctl.actions.prepare import gpu_for, prepare, probe
from labctl.errors import (
    BusyError,
    HostKeyError,
    InterruptError,
    LabError,
    PolicyError,
    ProviderError,
)
from labctl.model import CreateRequest, Need, Offer, Resource, Server, Value
from labctl.providers import Console, Lease, Stoppable

INVISIBLE_S = 60.0
"""A server just created may not be shown for so long: not found is not gone."""
RUNNING_DEADLINE_S = 300.0
SSH_DEADLINE_S = 120.0
GONE_DEADLINE_S = 120.0
POLL_S = 0.25
LEASE_S = 24 * 3600
"""How long a machine that others share is held without `ttl`, counted from the last run."""


class Removal(Value, frozen=True):
    """What `remove` left behind: nothing, if both are empty but for caches."""

    server_id: str
    survivors: tuple[Server, ...] = ()
    leftovers: tuple[Resource, ...] = ()


def up(ground: Ground, need: Need) -> Server:
    """A ready server for the lab: the one it has, or a new one. Safe to repeat and to interrupt."""
    with ground.state.exclusive(ground.lab_id, "up"):
        try:
            server = adopt(ground) or _create(ground, need)
            server = make_ready(ground, server)
            gpu_for(need, ground.facts(server), ground.reporter)
            return server
        except KeyboardInterrupt:
            raise InterruptError(
                "interrupted while the server was being made",
                why="it may exist already",
                hint="labctl up goes on, labctl down removes it",
            ) from None


def adopt(ground: Ground) -> Server | None:
    """The lab's server as its provider knows it, recorded again; None where there is none."""
    known = ground.state.server_of_lab(ground.lab_id)
    found = _as_provided(ground, known) if known else None
    if found is None:
        ours = [s for s in ground.provider.servers() if s.lab_id == ground.lab_id]
        alive = [s for s in ours if s.state != "terminated"]
        found = alive[0] if alive else None
    if found is None:
        if known is not None:
            ground.state.drop_server(known.id)
        return None
    found = _named(ground, found, known)
    ground.state.save_server(found)
    for token in [attempt.token for attempt in ground.state.open_attempts(ground.lab_id)]:
        ground.state.end_attempt(token, "adopted")
    return found


def _as_provided(ground: Ground, known: Server) -> Server | None:
    """What the provider says of a server we know; its pinned key must be the one we know."""
    deadline = known.created_at + INVISIBLE_S
    while True:
        found = ground.provider.find(known.id)
        if found is not None and found.state != "terminated":
            break
        if found is not None or time.time() > deadline:
            return None
        time.sleep(POLL_S)
    pinned, seen = known.endpoint.host_key, found.endpoint.host_key
    if pinned and seen and pinned != seen:
        raise HostKeyError(
            f"the server {known.id} shows another host key than the one that was pinned",
            why="it was replaced, or somebody stands in between",
            hint="labctl down --discard removes it",
        )
    return found


def _named(ground: Ground, server: Server, known: Server | None) -> Server:
    """`server` under an alias that nothing else in the user's ssh config bears."""
    alias = known.alias if known else ground.config.name
    if not ground.connections.alias_free(alias, server.id):
        alias = f"{ground.config.name}-{ground.lab_id[:4]}"
        if known is None or known.alias != alias:
            text = f"ssh already knows a host {ground.config.name}; this one is called {alias}"
            ground.reporter.emit(Note(text=text))
    return msgspec.structs.replace(server, alias=alias)


def _create(ground: Ground, need: Need) -> Server:
    offers = ground.provider.offers(need)
    ceiling = need.max_price_usd_per_hour
    fitting = [o for o in offers if ceiling is None or o.price_usd_per_hour <= ceiling]
    if not fitting:
        raise _no_offer(ground, need, offers)
    offer = fitting[0]
    _agree(ground, offer)
    request = _request(ground, need)
    ground.state.begin_attempt(request.token, request, offer)
    ground.state.record("attempt", lab_id=ground.lab_id, detail={"token": request.token})
    step = Step(name=f"making a server ({ground.provider.name} {offer.type})")
    ground.reporter.emit(step)
    try:
        server = ground.provider.create(offer, request)
    except LabError:
        ground.state.end_attempt(request.token, "failed")
        raise
    server = _named(ground, server, None)
    ground.state.save_server(server)
    ground.state.end_attempt(request.token, "created")
    ground.state.record(
        "created",
        lab_id=ground.lab_id,
        server_id=server.id,
        detail={"price_usd_per_hour": offer.price_usd_per_hour, "type": offer.type},
    )
    ground.reporter.emit(msgspec.structs.replace(step, done=True, detail=server.id))
    return server


def _no_offer(ground: Ground, need: Need, offers: list[Offer]) -> ProviderError:
    if offers:
        cheapest = min(o.price_usd_per_hour for o in offers)
        why = f"the cheapest costs {cheapest:.2f} dollars an hour, above max_price"
    elif need.gpu.required:
        why = f"it has no GPU for `gpu: {need.gpu.kind}`"
        if ground.provider.name == "local":
            why += "; a container on this machine runs on the CPU"
    else:
        why = "it gives nothing that fits lab.yaml's server section"
    return ProviderError(
        f"{ground.provider.name} has no server for {ground.config.name}",
        why=why,
        hint="labctl config shows what is asked for",
    )


def _agree(ground: Ground, offer: Offer) -> None:
    if offer.price_usd_per_hour <= 0:
        return
    question = f"start {offer.type} for {offer.price_usd_per_hour:.2f} dollars an hour?"
    if not ground.reporter.ask(Decision(question=question)):
        raise PolicyError("nothing was started", why="the price was not agreed to")


def _request(ground: Ground, need: Need) -> CreateRequest:
    identity = ground.paths.keys_dir / ground.lab_id / "id_ed25519"
    return CreateRequest(
        lab=ground.config.name,
        lab_id=ground.lab_id,
        token=secrets.token_hex(8),
        public_key=make_key(identity),
        identity=str(identity),
        need=need,
        tags={"labctl.lab-id": ground.lab_id},
    )


def make_ready(ground: Ground, server: Server) -> Server:
    """Wait for the machine and its sshd, then for what labctl needs on it."""
    # Only a server that was made here and was never ready can hold nothing: others are kept.
    made = ground.state.events(server_id=server.id, kind="created")
    fresh = bool(made) and not ground.state.events(server_id=server.id, kind="ready")
    try:
        ground.reporter.emit(Step(name="waiting for its sshd"))
        server = _running(ground, server)
        transport = ground.connections.wait_for_ssh(server, SSH_DEADLINE_S)
        ground.reporter.emit(Step(name="waiting for its sshd", done=True))
    except (BusyError, ProviderError) as error:
        if fresh:
            _undo(ground, server, error)
        raise
    facts = prepare(
        transport,
        server,
        probe(transport),
        playbooks_dir=ground.paths.data_dir / "playbooks",
        ssh_config=ground.connections.config_path(server.id),
        reporter=ground.reporter,
    )
    ground.keep_facts(server, facts)
    ground.state.save_server(server)
    ground.state.record("ready", lab_id=ground.lab_id, server_id=server.id)
    return server


def _running(ground: Ground, server: Server) -> Server:
    """The server once it runs and its address and host key are known."""
    if server.state == "stopped" and isinstance(ground.provider, Stoppable):
        ground.provider.start(server.id)
    deadline = time.monotonic() + RUNNING_DEADLINE_S
    while True:
        found = ground.provider.find(server.id) or server
        if found.state == "running" and found.endpoint.host_key and found.endpoint.port:
            found = renamed(found, server)
            ground.state.save_server(found)
            return found
        if found.state in ("terminated", "stopped") and server.state != "stopped":
            raise ProviderError(f"the server {server.id} stopped while it was starting")
        if time.monotonic() > deadline:
            raise ProviderError(
                f"the server {server.id} did not start within {RUNNING_DEADLINE_S:.0f} s"
            )
        time.sleep(POLL_S)


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


def renamed(found: Server, known: Server) -> Server:
    """What the provider found, under the alias that we gave it."""
    return msgspec.structs.replace(found, alias=known.alias)


def _undo(ground: Ground, server: Server, error: LabError) -> None:
    """A server that never became reachable is shown for what it is and taken down again."""
    if isinstance(ground.provider, Console):
        tail = ground.provider.console(server.id).strip().splitlines()[-15:]
        text = "the server's console:\n" + "\n".join(tail)
        ground.reporter.emit(Note(text=text, level="warning"))
    remove(ground, server)
    error.why = f"{error.why}; the server was removed again".lstrip("; ")


def remove(ground: Ground, server: Server) -> Removal:
    """Terminate, wait for the provider's word, forget; then say what is left. Safe to repeat.

    BusyError where the provider does not confirm in time: the record stays.
    """
    ground.connections.close(server)
    ground.provider.terminate(server.id)
    deadline = time.monotonic() + GONE_DEADLINE_S
    while (found := ground.provider.find(server.id)) and found.state != "terminated":
        if time.monotonic() > deadline:
            raise BusyError(
                f"{ground.provider.name} has not confirmed that {server.id} is gone",
                why=f"it says: {found.state}",
                hint="labctl down",
            )
        time.sleep(POLL_S)
    ground.state.drop_server(server.id)
    ground.connections.forget(server.id)
    ground.state.record("terminated", lab_id=ground.lab_id, server_id=server.id)
    ours = [s for s in ground.provider.servers() if s.lab_id == ground.lab_id]
    return Removal(
        server_id=server.id,
        survivors=tuple(s for s in ours if s.state != "terminated"),
        leftovers=tuple(ground.provider.leftovers()),
    )

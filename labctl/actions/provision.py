"""Getting a server ready: the one that the lab has, or a new one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from labctl.actions import (
    Note,
    Step,
    accounts,
    attempts,
    cost,
    deadlines,
    first_contact,
    guard,
    kept,
    provenance,
    removal,
)
from labctl.actions.bills import told_what_bills
from labctl.actions.connections import answers
from labctl.actions.ground import Ground
from labctl.actions.prepare import gpu_for, prepare, probe
from labctl.actions.store import prepare_store
from labctl.errors import (
    BusyError,
    CredentialsError,
    HostKeyError,
    InterruptError,
    LabError,
    PolicyError,
    ProviderError,
    ThrottledError,
)
from labctl.model import Server
from labctl.providers import Console, Explains, Gate, Keep, Lease, Stoppable
from labctl.transports import Transport

ENDED = accounts.ENDED
ANSWER_S = 2.0
CONSOLE_LINES = 15
RUNNING_DEADLINE_S = 300.0
SSH_DEADLINE_S = 120.0
POLL_S = 0.25
LEASE_S = 24 * 3600
"""How long a machine that others share is held without `ttl`, counted from the last run."""


def up(ground: Ground, listed: Sequence[Server] | None = None) -> Server:
    """A ready server for the lab: the one it has, or a new one. Safe to repeat and to interrupt.

    `listed` is what the provider has just shown, where somebody has asked it already.
    """
    with ground.state.exclusive(ground.lab_id, "up"):
        try:
            with told_what_bills(ground, LabError):
                need = ground.config.server.need
                server = adopt(ground, listed) or attempts.make(ground, need)
                server = make_ready(ground, server)
                gpu_for(need, ground.facts(server), ground.reporter)
                return server
        except KeyboardInterrupt:
            raise InterruptError(
                "interrupted while the server was being made",
                why="it may exist already",
                hint="labctl up goes on, labctl down removes it",
            ) from None


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
        alive = [s for s in ours if s.state not in ENDED]
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
        if found is not None and found.state not in ENDED:
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


def make_ready(ground: Ground, server: Server) -> Server:
    """Wait for the machine and its sshd, then for what labctl needs on it."""
    deadlines.note_declined(ground, server)
    server, transport = reach(ground, server)
    server = first_contact.settle(ground, server, transport)
    facts = prepare(
        transport,
        server,
        probe(transport),
        playbooks_dir=ground.paths.data_dir / "playbooks",
        ssh_config=ground.connections.config_path(server.id),
        reporter=ground.reporter,
        boto3=_needs_boto3(ground),
    )
    ground.keep_facts(server, facts)
    ground.state.save_server(server)
    prepare_store(ground, server)
    need = ground.config.server.need
    left = attempts.budget_left_usd(ground, need, but=server.id)
    watch = guard.arm(ground, server, budget_left_usd=left, ceiling_s=need.max_ttl_s)
    for lack in watch.get("cannot") or ():
        ground.reporter.emit(Note(text=lack, level="warning"))
    if text := deadlines.describe(ground, server, watch):
        ground.reporter.emit(Note(text=text))
    detail = provenance.machine(facts)
    ground.state.record("ready", lab_id=ground.lab_id, server_id=server.id, detail=detail)
    kept.restore(ground, server)
    return server


def _needs_boto3(ground: Ground) -> bool:
    """Whether the server is to have its disk kept when it ends, or to use S3."""
    provider = ground.provider
    keeps = isinstance(provider, Keep) and provider.keeps_itself
    addresses = [ground.config.store, *(source.url for source in ground.config.data.values())]
    return keeps or any(address.startswith("s3:") for address in addresses)


def reach(ground: Ground, server: Server) -> tuple[Server, Transport]:
    """The server once it runs, and a transport on which a login has worked.

    A new one that cannot be reached is shown for what it is and removed again.
    """
    fresh = is_fresh(ground, server)
    try:
        ground.reporter.emit(Step(name="waiting for its sshd"))
        server = _running(ground, server)
        deadlines.set_first(ground, server)
        if not fresh:
            admit(ground, server)
        transport = ground.connections.wait_for_ssh(server, SSH_DEADLINE_S)
        ground.reporter.emit(Step(name="waiting for its sshd", done=True))
    except (CredentialsError, ThrottledError):
        # Not the server's fault, and the provider would not hear of a removal either.
        raise
    except (BusyError, ProviderError) as error:
        if fresh:
            _undo(ground, server, error)
        raise
    return server, transport


def is_fresh(ground: Ground, server: Server) -> bool:
    """Whether it was made here and was never ready: it can hold nothing that anybody wants."""
    made = ground.state.events(server_id=server.id, kind="created", limit=1)
    return bool(made) and not ground.state.events(server_id=server.id, kind="ready", limit=1)


def let_in(ground: Ground, server: Server) -> None:
    """`admit`, where the provider keeps a gate and the server does not answer from here now."""
    if isinstance(ground.provider, Gate) and not answers(server.endpoint, ANSWER_S):
        admit(ground, server)


def admit(ground: Ground, server: Server) -> None:
    """Let this machine's present address reach the server, where the provider keeps a gate."""
    if not isinstance(ground.provider, Gate):
        return
    if address := ground.provider.admit(server.id):
        ground.reporter.emit(Note(text=f"ssh is open to {address} and to no other address"))


def _running(ground: Ground, server: Server) -> Server:
    """The server once it runs and its address and host key are known."""
    if server.state == "stopped" and isinstance(ground.provider, Stoppable):
        ground.provider.start(server.id)
        ground.state.record("started", lab_id=ground.lab_id, server_id=server.id)
    deadline = time.monotonic() + RUNNING_DEADLINE_S
    while True:
        found = _seen(ground, server)
        if found is None:
            pass
        elif found.state == "running" and found.endpoint.host_key and found.endpoint.port:
            found = ground.as_ours(found, server)
            ground.state.save_server(found)
            return found
        elif found.state in (*ENDED, "stopped") and server.state != "stopped":
            raise ProviderError(
                f"the server {server.id} stopped while it was starting",
                hint="labctl up tries again; labctl down removes what is left",
            )
        if time.monotonic() > deadline:
            raise ProviderError(
                f"the server {server.id} did not start within {RUNNING_DEADLINE_S:.0f} s",
                hint="labctl up tries again; labctl down removes what is left",
            )
        time.sleep(POLL_S)


def _seen(ground: Ground, server: Server) -> Server | None:
    """The server as its provider shows it; None also where the provider cannot be asked just now:
    nothing is given up for that."""
    try:
        return ground.provider.find(server.id)
    except (ThrottledError, BusyError):
        return None


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


def _undo(ground: Ground, server: Server, error: LabError) -> None:
    """A server that never became reachable is shown for what it is and taken down again."""
    ground.reporter.emit(Note(text=_console(ground, server), level="warning"))
    try:
        removal.remove(ground, server)
    except LabError as left:
        left.why = "\n".join(filter(None, [f"it was to be removed: {error.what}", left.why]))
        raise
    error.why = "\n".join(filter(None, [error.why, "the server was removed again"]))
    error.hint = "labctl up   # makes another one"


def _console(ground: Ground, server: Server) -> str:
    if not isinstance(ground.provider, Console):
        return f"{server.id} is removed again"
    try:
        said = ground.provider.console(server.id).strip()
    except LabError as error:
        return f"the server's console cannot be read: {error.what}"
    tail = "\n".join(f"  {line}" for line in said.splitlines()[-CONSOLE_LINES:])
    return f"the end of the server's console:\n{tail}" if said else "the server's console is empty"

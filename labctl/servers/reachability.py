"""Until a server runs and lets labctl log in; one that never does is removed again."""

from __future__ import annotations

import time

from labctl.errors import BusyError, CredentialsError, LabError, ProviderError, ThrottledError
from labctl.events import Note, Step
from labctl.model import Server
from labctl.providers import Console, Stoppable
from labctl.servers import deadlines, end_server
from labctl.servers.accounts import ENDED
from labctl.servers.adoption import is_fresh
from labctl.servers.context import Ground
from labctl.servers.gate import admit
from labctl.transports import Transport

CONSOLE_LINES = 15
RUNNING_DEADLINE_S = 300.0
SSH_DEADLINE_S = 120.0
POLL_S = 0.25


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


def _undo(ground: Ground, server: Server, error: LabError) -> None:
    """A server that never became reachable is shown for what it is and taken down again."""
    ground.reporter.emit(Note(text=_console(ground, server), level="warning"))
    try:
        end_server.remove(ground, server)
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

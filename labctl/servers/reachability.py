"""Wait until a server runs and labctl can log in; remove a new one that never gets there."""

from __future__ import annotations

import time
from contextlib import suppress

from labctl.errors import (
    AuthenticationError,
    BusyError,
    ConnectError,
    CredentialsError,
    HostKeyError,
    LabError,
    ProviderError,
    ThrottledError,
)
from labctl.events import Note, Step
from labctl.model import Server
from labctl.providers import ConsoleSource, Explains, Provider, SlowFirstBoot
from labctl.retry import poll_until
from labctl.servers import deadlines, end_server
from labctl.servers.accounts import ENDED, is_gone
from labctl.servers.adoption import is_fresh
from labctl.servers.context import LabContext
from labctl.servers.firewall import admit
from labctl.servers.power import start_if_stopped
from labctl.text import duration_text
from labctl.transports import Transport

CONSOLE_LINES = 15
RUNNING_DEADLINE_S = 300.0
SSH_DEADLINE_S = 120.0
POLL_S = 0.25
# seconds between two questions to the provider while logins fail: a check takes an API call
END_CHECK_S = 5.0


def wait_until_reachable(context: LabContext, server: Server) -> tuple[Server, Transport]:
    """Wait for a server; return it and a transport on which a login has worked.

    A new server that cannot be reached, or that refuses the login, is removed again, after its
    console output is shown.
    """
    fresh = is_fresh(context, server)
    try:
        slow = fresh and isinstance(context.provider, SlowFirstBoot)
        running_s, ssh_s = _find_deadlines(context.provider, slow=slow)
        limit = f"at most {duration_text(running_s + ssh_s)}"
        context.reporter.emit(Step(name="connecting over SSH", detail=limit))
        server = _wait_until_running(context, server, running_s)
        deadlines.set_first_timer(context, server)
        if not fresh:
            admit(context, server)
        transport = context.connections.wait_for_ssh(
            server, ssh_s, context.name, _EndCheck(context, server), waits_for_host_key=slow
        )
        context.reporter.emit(Step(name="connecting over SSH", done=True))
    except (CredentialsError, ThrottledError):
        # Not the server's fault, and the provider would not accept its removal either.
        raise
    except (BusyError, ProviderError) as error:
        if fresh:
            _undo(context, server, error)
            error.hint = f"{context.subject.up}   # creates another one"
        raise
    except (AuthenticationError, HostKeyError) as error:
        # Another server would refuse the login too, so the error keeps its own hint.
        if fresh:
            _undo(context, server, error)
        raise
    return server, transport


def _find_deadlines(provider: Provider, *, slow: bool) -> tuple[float, float]:
    """Return how long a server may take until it runs, and then until a login works."""
    if slow and isinstance(provider, SlowFirstBoot):
        return provider.running_deadline_s, SSH_DEADLINE_S + provider.host_key_deadline_s
    return RUNNING_DEADLINE_S, SSH_DEADLINE_S


def _wait_until_running(context: LabContext, server: Server, deadline_s: float) -> Server:
    """Wait until the server runs and its address and host key are known; start a stopped one."""
    start_if_stopped(context, server)
    again = f"{context.subject.up}   # again\n{context.subject.down}   # removes what is left"

    def find_running() -> Server | None:
        shown = _find(context, server)
        if shown is None:
            return None
        if shown.state in (*ENDED, "stopped") and server.state != "stopped":
            raise ProviderError(f"the server {server.id} stopped while it was starting", hint=again)
        is_ready = shown.state == "running" and shown.endpoint.host_key and shown.endpoint.port
        return shown if is_ready else None

    shown = poll_until(find_running, pause_s=POLL_S, deadline_s=deadline_s)
    if shown is None:
        raise ProviderError(
            f"the server {server.id} did not start within {deadline_s:.0f} s", hint=again
        )
    running = context.assign_alias(shown, server)
    context.state.save_server(running)
    return running


class _EndCheck:
    """Asks the provider, every few failed logins, whether the server has ended meanwhile.

    Call it with the error of a login. ProviderError if the server has ended or is stopped.
    """

    def __init__(self, context: LabContext, server: Server) -> None:
        self._context = context
        self._server = server
        self._checked_at_s = time.monotonic()

    def __call__(self, error: BaseException) -> None:
        if time.monotonic() - self._checked_at_s < END_CHECK_S:
            return
        self._checked_at_s = time.monotonic()
        state = self._read_state()
        if state in (*ENDED, "stopped"):
            verb = "was stopped" if state == "stopped" else "has ended"
            raise ProviderError(
                f"the server {self._server.id} {verb} while labctl was logging in to it",
                why=self._explain_end(),
                hint=f"{self._context.subject.up}   # starts it again, or gets another one",
            )

    def _read_state(self) -> str:
        """Return the server's state; "" if the provider does not say it now."""
        with suppress(LabError):  # the login says more, or works
            shown = self._context.provider.find(self._server.id)
            if shown is not None:
                return shown.state
            if is_gone(self._context, self._server):
                return "terminated"
        return ""

    def _explain_end(self) -> str:
        """Return the provider's reason, such as a limit or the staff's command; "" without one."""
        provider = self._context.provider
        if isinstance(provider, Explains):
            with suppress(LabError):
                return provider.explain_end(self._server.id)
        return ""


def _find(context: LabContext, server: Server) -> Server | None:
    """Find the server at its provider; None also while the provider is busy, so that we wait on."""
    try:
        return context.provider.find(server.id)
    except (ThrottledError, BusyError):
        return None


def _undo(context: LabContext, server: Server, error: LabError) -> None:
    """Show the console of a server that never became reachable, and remove the server."""
    context.reporter.emit(Note(text=_describe_console(context, server), level="warning"))
    try:
        end_server.remove(context, server)
    except LabError as failure:
        reason = f"the server was being removed because: {error.what}"
        failure.why = "\n".join(filter(None, [reason, failure.why]))
        raise
    # A course's keeper has removed it as well, and said so.
    reasons = [*(error.why or "").splitlines(), "the server was removed again"]
    error.why = "\n".join(dict.fromkeys(reasons))
    if isinstance(error, ConnectError):
        error.hint = lambda subject: f"{subject.up}   # creates another one"


def _describe_console(context: LabContext, server: Server) -> str:
    if not isinstance(context.provider, ConsoleSource):
        return f"removing {server.id} again"
    try:
        output = context.provider.read_console(server.id).strip()
    except LabError as error:
        return f"the server's console cannot be read: {error.what}"
    tail = "\n".join(f"  {line}" for line in output.splitlines()[-CONSOLE_LINES:])
    return (
        f"the end of the server's console:\n{tail}" if output else "the server's console is empty"
    )

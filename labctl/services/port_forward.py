"""One forward: a local port of a service on the server, through the user's OpenSSH.

It has its own connection. A thread notices when that is dead (ssh itself, within 6 s; a service
that is gone, by a health check), and reconnects until the forward is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal

from labctl.commands.ssh import NodeLogin, forward_argv, host_key_alias, known_hosts_line
from labctl.config.identity import replace_file
from labctl.errors import AuthenticationError, ConnectError, HostKeyError, LabError, NotFoundError
from labctl.events import Note, Reporter, SilentReporter
from labctl.lazy import lazy_imports
from labctl.model import Endpoint, Service, Value
from labctl.parallel import on_cancel
from labctl.retry import retry_on
from labctl.servers.job_queue import find_node_key
from labctl.services.services import usual_port
from labctl.transports import failures
from labctl.transports.ssh_client import spawn_ssh

with lazy_imports(__name__):
    import tenacity

READY_S = 20.0
# How long the server's port may refuse: labctl opens a forward once the service answers there.
REFUSED_S = 1.0
HEALTHCHECK_EVERY_S = 10.0
PROBE_EVERY_S = 0.1
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
# Ctrl-C reaches every program of the terminal. An ssh that ended before labctl would look like a
# lost connection; labctl ends it instead. A hangup still ends it, with or without labctl.
IGNORE_INTERRUPT = ("/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh")


# What a local port does: nobody listens, it drops connections at once, or the service is there.
PortState = Literal["closed", "refused", "answering"]


class EndedForwardError(LabError):
    """Another forward has taken the place of this one, or the new server has no such service."""


# Errors for which a retry is useless.
FATAL = (HostKeyError, AuthenticationError, EndedForwardError)


class ForwardSpec(Value, frozen=True, kw_only=True):
    """A forward's target: the server's ssh_config, its name in there, and the service.

    `local_port` 0 means the usual port of the service, or a free one if that is in use.
    """

    config: str
    server_id: str
    endpoint: Endpoint
    service: Service
    local_port: int = 0


# Finds the lab's server, which another one may have replaced, and restarts the service there;
# called before a retry.
Refresh = Callable[[], ForwardSpec]


def build_url(service: Service, local_port: int, *, token: bool = True) -> str:
    """Return the service's URL on this machine."""
    ending = f"?token={service.token}" if service.token and token else ""
    return f"http://127.0.0.1:{local_port}{service.path}{ending}"


class Forwarding:
    """One forward of this process. `open` (or `with`) returns once the service answers through it.

    Reports lost and restored connections to `reporter`, from its own thread.
    """

    def __init__(
        self, spec: ForwardSpec, reporter: Reporter | None = None, refresh: Refresh | None = None
    ) -> None:
        self.service = spec.service
        self.local_port = 0
        self.failure: LabError | None = None
        self._spec = spec
        self._reporter = reporter or SilentReporter()
        self._refresh = refresh
        self._closing = threading.Event()
        self._guard = threading.Lock()
        self._ssh: SshProcess | None = None
        self._thread = threading.Thread(target=self._watch, name="forward", daemon=True)

    @property
    def url(self) -> str:
        return build_url(self.service, self.local_port)

    def open(self) -> Forwarding:
        """Connect; NotFoundError without ssh, ConnectError etc. as for any command."""
        if self._thread.is_alive():
            return self
        if not shutil.which("ssh"):
            raise NotFoundError(
                "a forward needs OpenSSH, which is not installed on this machine",
                hint="sudo apt install openssh-client",
            )
        wanted = self._spec.local_port or usual_port(self.service.name, self.service)
        self.local_port = find_free_port(wanted)
        with on_cancel(self._closing.set):
            try:
                self._connect()
            except _PortTakenError:
                self.local_port = find_free_port(0)
                self._connect()
        if self.local_port != wanted:
            self._report(f"local port {wanted} is in use; {self.service.name} is at {self.url}")
        self._thread.start()
        return self

    def wait(self) -> None:
        """Block until `close`, or raise the error for which a retry is useless."""
        while self._thread.is_alive():
            self._thread.join(1.0)
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Close the forward. Idempotent."""
        self._closing.set()
        self._drop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Forwarding:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _report(self, text: str, level: str = "info") -> None:
        self._reporter.emit(Note(text=text, level=level))

    def _drop(self) -> None:
        with self._guard:
            ssh, self._ssh = self._ssh, None
        if ssh is not None:
            ssh.end()

    def _connect(self) -> None:
        """Start ssh and return once the service answers through it."""
        far = self.service.socket or self.service.port
        ports, node = [(self.local_port, far)], _build_node_login(self._spec, self.service)
        argv = forward_argv(self._spec.config, self._spec.server_id, ports, node)
        with self._guard:
            if self._closing.is_set():
                return
            self._ssh = ssh = SshProcess(argv)
        deadline = time.monotonic() + READY_S
        is_refused = False
        while (state := self._probe(ssh)) != "answering":
            if ssh.process.poll() is not None:
                raise self._make_exit_error(ssh)
            if state == "refused" and not is_refused:
                is_refused, deadline = True, time.monotonic() + REFUSED_S
            if time.monotonic() > deadline:
                self._drop()
                raise _make_silent_error(self.service)
            if self._closing.wait(PROBE_EVERY_S):
                return

    def _probe(self, ssh: SshProcess) -> PortState:
        """Probe the local port once ssh listens there: before, another program might answer."""
        if not ssh.is_listening(PROBE_EVERY_S):
            return "closed"
        state = probe_port(self.local_port, self.service.path)
        return state if ssh.process.poll() is None else "closed"

    def _make_exit_error(self, ssh: SshProcess) -> LabError:
        """Return the error for an ssh process that has ended."""
        stderr, has_listened = ssh.read_stderr(), ssh.is_listening(0)
        self._drop()
        # ssh exits with 255 for every error.
        if not has_listened and find_free_port(self.local_port) != self.local_port:
            return _PortTakenError(
                f"local port {self.local_port} is in use",
                hint=f"labctl forward {self.service.name}",
            )
        return failures.parse_ssh_error(self._spec.endpoint, stderr)

    def _watch(self) -> None:
        while not self._closing.is_set():
            refused = self._await_loss()
            if self._closing.is_set():
                return
            self._report(f"{self.service.name}: connection lost, reconnecting", "warning")
            if not self._reconnect(ask=refused):
                return
            at = build_url(self.service, self.local_port, token=False)
            self._report(f"{self.service.name}: reconnected, {at}")

    def _await_loss(self) -> bool:
        """Wait until ssh has ended (False), or the service has refused twice (True)."""
        refused = 0
        while self._ssh is not None and refused < 2:
            ssh = self._ssh
            with contextlib.suppress(subprocess.TimeoutExpired):
                ssh.process.wait(1.0 if refused else HEALTHCHECK_EVERY_S)
                return False
            refused = refused + 1 if _is_refused(self.local_port) else 0
        return refused > 0

    def _reconnect(self, *, ask: bool) -> bool:
        """Retry until connected; False if closed meanwhile, or if a retry is useless.

        Usually only the connection was lost, so the service itself is checked on the server (`ask`)
        only after a first retry has failed.
        """

        def connect() -> bool:
            nonlocal ask
            if self._closing.is_set():
                return False
            self._drop()
            try:
                if ask and self._refresh is not None:
                    self._spec = self._refresh()
                    self.service = self._spec.service
                ask = True
                self._connect()
            except FATAL as error:
                self.failure = error
                self._report(f"{self.service.name}: {error.what}", "warning")
                return False
            return not self._closing.is_set()

        policy = retry_on(LabError, pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S)
        return policy.copy(sleep=tenacity.sleep_using_event(self._closing))(connect)


def _build_node_login(spec: ForwardSpec, service: Service) -> NodeLogin | None:
    """Return the login to the machine of a job; None if the service is on the server itself."""
    if service.node is None:
        return None
    known_hosts = Path(spec.config).with_name("node_known_hosts")
    alias = f"{host_key_alias(spec.server_id)}-node"
    replace_file(known_hosts, known_hosts_line(alias, service.node.host_key).encode())
    identity = find_node_key(Path(spec.config))
    return NodeLogin(service.node.command, alias, str(known_hosts), str(identity))


class _PortTakenError(LabError):
    """Another program uses the local port."""


class SshProcess:
    """One ssh process and its error output."""

    def __init__(self, argv: list[str]) -> None:
        # An unnamed file: a pipe that is never read would block ssh when it is full.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (`end` closes it)
        self.process = spawn_ssh([*IGNORE_INTERRUPT, *argv], subprocess.PIPE, self._errors)
        self._listening = False
        # Another thread may end this process while one waits for it.
        self._lock = threading.Lock()
        self._ended = False

    def is_listening(self, wait_s: float) -> bool:
        """Whether ssh listens on the local port, which it says on its output, within `wait_s`."""
        with self._lock:
            if not self._listening and not self._ended:
                assert self.process.stdout is not None
                output = self.process.stdout.fileno()
                poll = select.poll()
                poll.register(output, select.POLLIN)
                self._listening = bool(poll.poll(wait_s * 1000) and os.read(output, 16))
            return self._listening

    def read_stderr(self) -> str:
        with self._lock:
            if self._ended:
                return ""
            return os.pread(self._errors.fileno(), 16_384, 0).decode(errors="replace")

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(3.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self._lock:
            self._ended = True
            for stream in (self.process.stdin, self.process.stdout, self._errors):
                if stream is not None:
                    stream.close()


def find_free_port(wanted: int) -> int:
    """Return `wanted` if it is free on the loopback, else (and for 0) any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise LabError("this machine has no free port", hint="labctl forward --list")


def _make_silent_error(service: Service) -> ConnectError:
    """Return the error for a service whose port refuses connections."""
    if service.container:
        return ConnectError(
            f"{service.name} does not answer through the forward",
            why=f"nothing listens on port {service.port} of the server any more",
            hint=f"labctl forward {service.name}",
        )
    return ConnectError(
        f"nothing listens on port {service.port} of the server",
        why="the next command lists the ports that are open there\n"
        "a program inside a run has no port on the server: add it to services: in lab.yaml, "
        "with command and port",
        hint="labctl ssh -- ss -ltn",
    )


def probe_port(port: int, path: str, *, timeout_s: float = 5.0) -> PortState:
    """Check whether a request to a local port reaches the service, even if that sends no reply.

    ssh accepts every connection, and drops it at once if the server's port refuses.
    """
    request = f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n"
    return _probe(port, request.encode(), timeout_s)


def _is_refused(port: int) -> bool:
    return _probe(port, b"", 0.5) != "answering"


def _probe(port: int, request: bytes, timeout_s: float) -> PortState:
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=2.0)
    except OSError:
        return "closed"
    with connection:
        try:
            connection.sendall(request)
            connection.settimeout(timeout_s)
            return "answering" if connection.recv(1) else "refused"
        except TimeoutError:
            return "answering"
        except OSError:
            return "refused"

"""A private Unix socket of this machine that leads to a service on a server, through OpenSSH."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from labctl.commands.ssh import socket_forward_argv
from labctl.errors import ConnectError
from labctl.model import Endpoint, Service, Value
from labctl.services.port_forward import SshProcess
from labctl.transports import failures

READY_S = 20.0
POLL_S = 0.2
# time that a busy service may take
ANSWER_S = 10.0


class SocketForwardSpec(Value, frozen=True, kw_only=True):
    """The server's ssh_config, its name in there, the service, and the path of the socket."""

    config: str
    server_id: str
    endpoint: Endpoint
    service: Service
    path: str


class SocketForward:
    """One forward, as a process of its own. Only this user can open its socket."""

    def __init__(self, spec: SocketForwardSpec) -> None:
        self.spec = spec
        far = spec.service.socket or spec.service.port
        self._ssh = SshProcess(socket_forward_argv(spec.config, spec.server_id, spec.path, far))
        try:
            self._wait_until_open()
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the connection still stands; ssh notices a dead one within 6 s."""
        return self._ssh.process.poll() is None

    def is_answering(self) -> bool:
        """Tell whether the service sends anything back; ssh itself accepts every connection."""
        request = f"GET {self.spec.service.path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(ANSWER_S)
            probe.connect(self.spec.path)
            probe.sendall(request.encode())
            return bool(probe.recv(1))
        return False

    def close(self) -> None:
        self._ssh.end()
        Path(self.spec.path).unlink(missing_ok=True)

    def _wait_until_open(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._ssh.is_listening(POLL_S):
            if not self.is_alive:
                raise failures.parse_ssh_error(self.spec.endpoint, self._ssh.read_stderr())
            if time.monotonic() > deadline:
                raise ConnectError(f"the connection to {self.spec.service.name} was not opened")

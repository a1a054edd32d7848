"""A real SSH server in this process that accepts a password and no key, and runs nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import paramiko
from paramiko.common import AUTH_FAILED, AUTH_SUCCESSFUL

PASSWORD = "correct horse"


@dataclass
class PasswordServer(paramiko.ServerInterface):
    """`port` is on the loopback; `passwords` are those that clients tried."""

    port: int
    methods: str = "publickey,password"
    passwords: list[str] = field(default_factory=list)

    def get_allowed_auths(self, username: str) -> str:
        return self.methods

    def check_auth_password(self, username: str, password: str) -> int:
        self.passwords.append(password)
        return AUTH_SUCCESSFUL if password == PASSWORD else AUTH_FAILED

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return AUTH_FAILED


@contextmanager
def serve_passwords() -> Iterator[PasswordServer]:
    """Serve clients, each in a thread of its own, until the end of the block."""
    host_key = paramiko.ECDSAKey.generate()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = PasswordServer(listener.getsockname()[1])

        def accept() -> None:
            while True:
                try:
                    wire, _ = listener.accept()
                except OSError:  # the listener is closed
                    return
                transport = paramiko.Transport(wire)
                transport.add_server_key(host_key)
                transport.start_server(threading.Event(), server)

        threading.Thread(target=accept, daemon=True).start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)

"""Runs a ProxyCommand of ssh_config(5) and connects a socket to it."""

from __future__ import annotations

import re
import socket
import subprocess
import threading
from concurrent.futures import Future
from functools import partial
from typing import IO, cast

from labctl.model import Endpoint

# A token that `ProxySocket.start` does not replace.
_OTHER_TOKEN = re.compile("%[^hpr]")
_MOST_STDERR_BYTES = 20_000
# seconds in which a command that has closed its end should have ended
_EXIT_S = 2.0


def can_start(proxy_command: str) -> bool:
    """Return whether the command has no other tokens than %h, %p and %r."""
    return not _OTHER_TOKEN.search(proxy_command.replace("%%", ""))


class ProxySocket(socket.socket):
    """A socket whose other end is the proxy command's standard input and output."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self._stderr: Future[bytes] = Future()

    @classmethod
    def start(cls, endpoint: Endpoint) -> ProxySocket:
        """Start the endpoint's proxy command.

        fabric would split the command without a shell, and its processes outlive a failed login.
        """
        values = {"%h": endpoint.host, "%p": str(endpoint.port), "%r": endpoint.user}
        parts = endpoint.proxy_command.split("%%")
        for token, value in values.items():
            parts = [part.replace(token, value) for part in parts]
        near, far = socket.socketpair()
        wire = cls(near.detach())
        with far:
            process = subprocess.Popen(
                ["sh", "-c", "exec " + "%".join(parts)],
                stdin=far.fileno(),
                stdout=far.fileno(),
                stderr=subprocess.PIPE,
            )
        wait = partial(_wait_for_end, process, wire._stderr)
        threading.Thread(target=wait, name="labctl-proxy", daemon=True).start()
        return wire

    def read_stderr(self) -> str:
        """Return what the command has printed before it ended; "" if it still runs."""
        try:
            return self._stderr.result(_EXIT_S).decode(errors="replace").strip()
        except TimeoutError:
            return ""


def _wait_for_end(process: subprocess.Popen[bytes], said: Future[bytes]) -> None:
    with process:
        stderr = cast("IO[bytes]", process.stderr)
        said.set_result(stderr.read(_MOST_STDERR_BYTES))
        while stderr.read(_MOST_STDERR_BYTES):
            pass

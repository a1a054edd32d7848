"""Waking a watchdog: a datagram to its socket makes it read its limits at once."""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from pathlib import Path

NAME = "bell"


class WakeupSocket:
    """The socket on which a watchdog waits."""

    def __init__(self, directory: Path) -> None:
        path = directory / NAME
        with suppress(FileNotFoundError):
            path.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.setblocking(False)

    def wait(self, span_s: float) -> None:
        """Wait for a datagram, at most `span_s` seconds."""
        if select.select([self._socket], [], [], span_s)[0]:
            with suppress(BlockingIOError):
                while True:
                    self._socket.recv(16)


def wake_watchdog(directory: Path) -> None:
    """Wake the watchdog of this directory, if one runs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell, suppress(OSError):
        bell.sendto(b"!", str(directory / NAME))

"""Notices a connection of paramiko's whose other side has stopped answering."""

from __future__ import annotations

import socket
import threading
import time

import paramiko

PING_EVERY_S = 2.0
SILENT_FOR_S = 7.0


class KeepAlive:
    """Closes a transport whose server has answered nothing for SILENT_FOR_S.

    `Transport.set_keepalive` asks for no answer, so it never notices a dead link, and
    TCP_USER_TIMEOUT covers neither a server behind a jump host nor an sshd that hangs. One thread
    pings and another watches, since a ping into a dead link blocks once the buffer is full.
    """

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport
        self._answered = time.monotonic()
        self._stopped = threading.Event()
        for loop in (self._ping, self._watch):
            threading.Thread(target=loop, name="labctl-keepalive", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _ping(self) -> None:
        while not self._stopped.wait(PING_EVERY_S) and self._transport.is_active():
            try:
                self._transport.global_request("keepalive@openssh.com", wait=True)
            except (paramiko.SSHException, OSError, EOFError):
                return
            self._answered = time.monotonic()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5) and self._transport.is_active():
            if time.monotonic() - self._answered > SILENT_FOR_S:
                # Frees a thread that blocks in writing. Closing a jump host's channel could block.
                if isinstance(self._transport.sock, socket.socket):
                    self._transport.sock.close()
                self._transport.close()
                return

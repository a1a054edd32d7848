"""paramiko's SFTP client, with a deadline for every answer of the server."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import paramiko

from labctl.model import Endpoint
from labctl.transports import failures

# Seconds without a byte from the server, or without room for one to it. Keep-alives notice a lost
# link sooner; this ends the wait for a server whose sshd runs and whose SFTP server hangs.
SILENCE_S = 30.0


@contextmanager
def open_sftp_client(
    endpoint: Endpoint, stream: paramiko.Channel | socket.socket
) -> Iterator[paramiko.SFTPClient]:
    """Speak SFTP through a channel, or a socket; it is closed afterwards.

    BusyError if the server does not answer a request within SILENCE_S seconds.
    """
    channel: Any = _SftpStream(stream)  # has what SFTPClient calls of a channel
    try:
        with closing(channel), closing(paramiko.SFTPClient(channel)) as client:
            yield client
    except TimeoutError as error:
        raise failures.make_silent_sftp_error(endpoint, SILENCE_S) from error
    except (paramiko.SSHException, EOFError) as error:
        raise failures.make_link_lost_error(endpoint, str(error)) from error


class _SftpStream:
    """A stream that closes itself after a silence: closing a file there would wait for another.

    Not a subclass of socket: for those, paramiko waits without a limit.
    """

    def __init__(self, stream: paramiko.Channel | socket.socket) -> None:
        stream.settimeout(SILENCE_S)
        self._stream = stream

    def send(self, data: bytes) -> int:
        try:
            return self._stream.send(data)
        except TimeoutError:
            self.close()
            raise

    def recv(self, size: int) -> bytes:
        try:
            return self._stream.recv(size)
        except TimeoutError:
            self.close()
            raise

    def recv_ready(self) -> bool:
        if isinstance(self._stream, paramiko.Channel):
            return self._stream.recv_ready()
        poll = select.poll()
        poll.register(self._stream, select.POLLIN)
        return bool(poll.poll(0))

    def get_name(self) -> str:
        return "sftp"

    def close(self) -> None:
        self._stream.close()

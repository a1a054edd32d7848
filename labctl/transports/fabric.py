"""fabric as a transport: connections inside this process, shared by its threads.

Programs that live long or reach many servers use it (the Python API, keepers, courses, the
dashboard), and so do machines without OpenSSH.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko

from labctl.model import Endpoint
from labctl.parallel import on_cancel
from labctl.transports import Body, Execution, RemoteShell, Transport, failures, iterate_blocks
from labctl.transports.fabric_login import STEP_TIMEOUT_S, Login, log_in
from labctl.transports.framing import MarkedOutputParser, frame
from labctl.transports.sftp import open_sftp_client

if TYPE_CHECKING:
    from labctl.transports.openssh import OpenSshTransport

# sshd allows ten sessions on a connection.
MOST_CHANNELS = 8
MOST_CHUNKS = 64
_CHUNK_BYTES = 64 * 1024
_PART_BYTES = 1024 * 1024
_NETWORK_ERRORS = (paramiko.SSHException, OSError, EOFError)
# sshd's answer above MaxSessions: SSH_OPEN_CONNECT_FAILED (RFC 4254, section 5.1).
NO_SESSION_FREE = 2
PAUSE_S = 0.05


class FabricTransport(Transport):
    """One connection, made by the first command and again after it was lost.

    Threads may share it: at most 8 commands and SFTP clients run at once, others wait.
    `known_hosts` is the user's file, for the keys of jump hosts. `openssh` lends its connection to
    rsync.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        known_hosts: Path | None = None,
        openssh: OpenSshTransport | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._openssh = openssh
        self._known_hosts = known_hosts
        # At most one. A list, so that it can be closed once this object is gone.
        self._logins: list[Login] = []
        weakref.finalize(self, _close_logins, self._logins).atexit = False
        self._connecting = threading.Lock()
        self._slots = threading.BoundedSemaphore(MOST_CHANNELS)

    @contextmanager
    def open_sftp(self) -> Iterator[paramiko.SFTPClient]:
        with self._slots, self._open_channel() as channel:
            try:
                channel.invoke_subsystem("sftp")
            except _NETWORK_ERRORS as error:
                raise failures.make_link_lost_error(self.endpoint, str(error)) from error
            with open_sftp_client(self.endpoint, channel) as client:
                yield client

    def remote_shell(self) -> RemoteShell | None:
        return None if self._openssh is None else self._openssh.remote_shell()

    def close(self) -> None:
        _close_logins(self._logins)
        if self._openssh is not None:
            self._openssh.close()

    def _connect(self) -> Login:
        with self._connecting:
            if not self._logins or not self._logins[0].is_alive:
                _close_logins(self._logins)
                self._logins.append(log_in(self.endpoint, self._known_hosts))
            return self._logins[0]

    def _open_channel(self) -> paramiko.Channel:
        """A channel; a connection that died while idle is replaced, since nothing has begun."""
        login = self._connect()
        try:
            return _open_session(login)
        except paramiko.ChannelException as error:
            raise failures.make_unreachable_error(self.endpoint, str(error)) from error
        except _NETWORK_ERRORS:
            login.close()
        try:
            return _open_session(self._connect())
        except _NETWORK_ERRORS as error:
            raise failures.make_link_lost_error(self.endpoint, str(error)) from error

    def _execute(self, execution: Execution) -> tuple[int, bytes]:
        deadline = execution.deadline
        framed = frame(execution.line)
        out = MarkedOutputParser(framed.mark, execution.on_stdout)
        err = MarkedOutputParser(framed.mark, execution.on_stderr, twice=True)
        with self._slots, self._open_channel() as channel:
            try:
                channel.exec_command(framed.line)
            except _NETWORK_ERRORS as error:
                raise failures.make_link_lost_error(self.endpoint, str(error)) from error
            with on_cancel(channel.close):
                body_errors = _send(channel, execution.stdin)
                in_time = _drain(channel, out, err, deadline)
                # The status comes after the output; -1 means that it is unknown.
                in_time = in_time and channel.status_event.wait(_seconds_left(deadline))
            code = channel.exit_status
        if body_errors:
            raise body_errors[0]
        if not in_time:
            raise failures.make_timeout_error(self.endpoint)
        out.finish()
        err.finish()
        if code < 0:
            raise failures.make_link_lost_error(self.endpoint, "")
        return code, out.noise


def _close_logins(logins: list[Login]) -> None:
    while logins:
        logins.pop().close()


def _seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _open_session(login: Login) -> paramiko.Channel:
    """A session of this connection.

    sshd may still be ending one that we have closed, and refuse another until then.
    """
    # Not labctl.retry: whether to try again depends on the error's code, and this is on the path
    # of every command.
    end = time.monotonic() + STEP_TIMEOUT_S
    while True:
        try:
            return login.transport.open_session(timeout=STEP_TIMEOUT_S)
        except paramiko.ChannelException as error:
            if error.code != NO_SESSION_FREE or time.monotonic() > end:
                raise
        time.sleep(PAUSE_S)


def _send(channel: paramiko.Channel, stdin: Body) -> list[Exception]:
    """Send `stdin` beside the reading, so that neither waits for the other.

    An error of `stdin` itself ends the command, and is then in the list that this returns.
    """
    errors: list[Exception] = []

    def feed() -> None:
        blocks = iterate_blocks(stdin)
        try:
            while (block := _read_next(blocks, errors)) is not None:
                for start in range(0, len(block), _PART_BYTES):
                    channel.sendall(bytes(block[start : start + _PART_BYTES]))
            if errors:
                channel.close()
            else:
                channel.shutdown_write()
        except _NETWORK_ERRORS:
            return  # the command ended without reading all of it, or the link was lost

    if callable(stdin) or stdin:
        threading.Thread(target=feed, name="labctl-stdin", daemon=True).start()
    else:
        feed()
    return errors


def _read_next(blocks: Iterator[memoryview], errors: list[Exception]) -> memoryview | None:
    """Return the next block, None at the end and after an error, which is added to `errors`."""
    try:
        return next(blocks, None)
    except Exception as error:
        errors.append(error)
        return None


def _drain(
    channel: paramiko.Channel,
    out: MarkedOutputParser,
    err: MarkedOutputParser,
    deadline: float | None,
) -> bool:
    """Pass output on until it ends; False where the deadline (monotonic) came first.

    A thread reads each stream, since the file descriptor that paramiko offers for waiting on
    both loses wake-ups when they race; this thread alone passes output on.
    """
    chunks: queue.Queue[tuple[MarkedOutputParser, bytes]] = queue.Queue(MOST_CHUNKS)

    def read(receive: Callable[[int], bytes], stream: MarkedOutputParser) -> None:
        while chunk := receive(_CHUNK_BYTES):
            chunks.put((stream, chunk))
        chunks.put((stream, b""))

    for receive, stream in ((channel.recv, out), (channel.recv_stderr, err)):
        threading.Thread(target=read, args=(receive, stream), daemon=True).start()
    reading = 2
    try:
        while reading:
            stream, chunk = chunks.get(timeout=_seconds_left(deadline))
            stream.feed(chunk)
            reading -= not chunk
    except queue.Empty:
        return False
    finally:
        if reading:
            channel.close()
        while reading:
            reading -= not chunks.get()[1]
    return True

"""A transport over paramiko: for machines without OpenSSH, and for single files over SFTP."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import paramiko

from labctl.errors import LabError, TransferError
from labctl.model import Endpoint
from labctl.shell import Command
from labctl.transports import Body, RemoteShell, Result, blocks, failures
from labctl.transports.bounded_output import Kept
from labctl.transports.framing import Unframer, frame
from labctl.transports.paramiko_login import STEP_TIMEOUT_S, Login, fetch_host_key, log_in

__all__ = ["ParamikoTransport", "fetch_host_key"]

MOST_CHANNELS = 8
MOST_CHUNKS = 64
_CHUNK_BYTES = 64 * 1024
_PART_BYTES = 1024 * 1024
_NETWORK_ERRORS = (paramiko.SSHException, OSError, EOFError)
# sshd's reply above MaxSessions: SSH_OPEN_CONNECT_FAILED (RFC 4254, section 5.1).
NO_SESSION_FREE = 2
PAUSE_S = 0.05


class ParamikoTransport:
    """One connection, opened by the first command and reopened after it was lost.

    Threads may share it: at most 8 commands run at once (sshd allows ten), others wait.
    `known_hosts` is the user's file, for the host keys of jump hosts.
    """

    def __init__(self, endpoint: Endpoint, *, known_hosts: Path | None = None) -> None:
        self.endpoint = endpoint
        self._known_hosts = known_hosts
        self._login: Login | None = None
        self._connecting = threading.Lock()
        self._slots = threading.BoundedSemaphore(MOST_CHANNELS)

    def run(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        timeout_s: float | None = 60.0,
        check: bool = True,
    ) -> Result:
        output = Kept(self.endpoint)
        code, noise = self._execute(line, stdin, timeout_s, output.out, output.err)
        result = Result(
            code=code,
            stdout=output.stdout,
            stderr=output.stderr,
            noise=noise.decode(errors="replace"),
        )
        if check and code:
            raise failures.failed(self.endpoint, str(line), code, result.stderr)
        return result

    def stream(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> int:
        return self._execute(line, stdin, None, on_stdout, on_stderr or _ignore)[0]

    def put(self, source: Path, target: str) -> None:
        """Upload one file over SFTP; `target` is replaced only when the upload is complete."""
        staged = f"{target}.labctl-part"
        with self._slots:
            try:
                with _open_session(self._ensure_login()) as channel:
                    channel.invoke_subsystem("sftp")
                    sftp = paramiko.SFTPClient(channel)
                    sftp.put(str(source), staged)
                    sftp.posix_rename(staged, target)
            except _NETWORK_ERRORS as error:
                raise self._explain_transfer_failure(target, error) from error

    def get(self, source: str, target: Path) -> None:
        """Download one file over SFTP; `target` is replaced only when the download is complete."""
        descriptor, staged = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
        os.close(descriptor)
        try:
            with (
                self._slots,
                _open_session(self._ensure_login()) as channel,
            ):
                channel.invoke_subsystem("sftp")
                paramiko.SFTPClient(channel).get(source, staged)
            Path(staged).replace(target)
        except _NETWORK_ERRORS as error:
            raise self._explain_transfer_failure(source, error) from error
        finally:
            Path(staged).unlink(missing_ok=True)

    def remote_shell(self) -> RemoteShell | None:
        return None

    def close(self) -> None:
        login, self._login = self._login, None
        if login is not None:
            login.close()

    def _explain_transfer_failure(self, name: str, error: BaseException) -> LabError:
        if self._login is None or not self._login.alive:
            return failures.lost(self.endpoint, str(error))
        return TransferError(f"{name} was not transferred", why=str(error), hint="labctl doctor")

    def _ensure_login(self) -> Login:
        with self._connecting:
            if self._login is None or not self._login.alive:
                self.close()
                self._login = log_in(self.endpoint, self._known_hosts)
            return self._login

    def _open_channel(self) -> paramiko.Channel:
        """Open a channel. A connection that died while idle is reopened: no command was lost."""
        login = self._ensure_login()
        try:
            return _open_session(login)
        except paramiko.ChannelException as error:
            raise failures.unreachable(self.endpoint, str(error)) from error
        except _NETWORK_ERRORS:
            login.close()
        try:
            return _open_session(self._ensure_login())
        except _NETWORK_ERRORS as error:
            raise failures.lost(self.endpoint, str(error)) from error

    def _execute(
        self,
        line: Command | str,
        stdin: Body,
        timeout_s: float | None,
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
    ) -> tuple[int, bytes]:
        """Run a line; return its exit code, and what the login shell printed before it started."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        framed = frame(line)
        out = Unframer(framed.mark, on_stdout)
        err = Unframer(framed.mark, on_stderr, twice=True)
        with self._slots, self._open_channel() as channel:
            try:
                channel.exec_command(framed.line)
            except _NETWORK_ERRORS as error:
                raise failures.lost(self.endpoint, str(error)) from error
            _send(channel, stdin)
            in_time = _drain(channel, out, err, deadline)
            # The exit status comes after the output; -1 means that it is unknown.
            in_time = in_time and channel.status_event.wait(_left_s(deadline))
            code = channel.exit_status
        if not in_time:
            raise failures.too_slow(self.endpoint)
        out.finish()
        err.finish()
        if code < 0:
            raise failures.lost(self.endpoint, "")
        return code, out.noise


def _ignore(_: bytes) -> None:
    pass


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _open_session(login: Login) -> paramiko.Channel:
    """Open a session of this connection, with retries for up to STEP_TIMEOUT_S.

    sshd may still be closing one that we have closed, and refuse another until then.
    """
    end = time.monotonic() + STEP_TIMEOUT_S
    while True:
        try:
            return login.transport.open_session(timeout=STEP_TIMEOUT_S)
        except paramiko.ChannelException as error:
            if error.code != NO_SESSION_FREE or time.monotonic() > end:
                raise
        time.sleep(PAUSE_S)


def _send(channel: paramiko.Channel, stdin: Body) -> None:
    """Write `stdin` in a thread of its own, so that reading and writing do not block each other."""

    def feed() -> None:
        try:
            for block in blocks(stdin):
                for start in range(0, len(block), _PART_BYTES):
                    channel.sendall(bytes(block[start : start + _PART_BYTES]))
            channel.shutdown_write()
        except _NETWORK_ERRORS:
            return  # the command ended without reading all of it, or the link was lost

    if callable(stdin) or stdin:
        threading.Thread(target=feed, name="labctl-stdin", daemon=True).start()
    else:
        feed()


def _drain(channel: paramiko.Channel, out: Unframer, err: Unframer, deadline: float | None) -> bool:
    """Pass on output until it ends; False if the deadline (monotonic) came first.

    A thread reads each stream, since the file descriptor that paramiko offers for waiting on
    both loses wake-ups when they race. Only this thread passes output on.
    """
    chunks: queue.Queue[tuple[Unframer, bytes]] = queue.Queue(MOST_CHUNKS)

    def read(take: Callable[[int], bytes], stream: Unframer) -> None:
        while chunk := take(_CHUNK_BYTES):
            chunks.put((stream, chunk))
        chunks.put((stream, b""))

    for take, stream in ((channel.recv, out), (channel.recv_stderr, err)):
        threading.Thread(target=read, args=(take, stream), daemon=True).start()
    reading = 2
    try:
        while reading:
            stream, chunk = chunks.get(timeout=_left_s(deadline))
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

"""A transport over the system's OpenSSH: one `ssh` process a command, over a shared master.

The master is labctl's own, separate from the one of interactive sessions. It starts with the first
command, outlives this process by some idle minutes, and is replaced if its socket does not answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from labctl.commands import ssh
from labctl.errors import LabError
from labctl.lazy import lazy_imports
from labctl.model import Endpoint
from labctl.parallel import on_cancel
from labctl.retry import retry_rejected_logins
from labctl.transports import Body, Execution, RemoteShell, Transport, failures, iterate_blocks
from labctl.transports.framing import Frame, MarkedOutputParser, frame
from labctl.transports.ssh_client import find_quick_login_options, runtime_dir, spawn_ssh

if TYPE_CHECKING:
    from paramiko import SFTPClient

with lazy_imports(__name__):
    import tempfile

    from labctl.transports import sftp

# Entered while a login of the shared master is under way.
ReportLogin = Callable[[], contextlib.AbstractContextManager[None]]

LOGIN_TIMEOUT_S = 20.0
_LOGIN_TIMED_OUT = f"the login took longer than {LOGIN_TIMEOUT_S:g} s"
_SSH_FAILED = 255
_CHUNK_BYTES = 256 * 1024
_PIPE_BYTES = 1024 * 1024
_POLL_S = 0.05


class OpenSshTransport(Transport):
    """Runs commands through `ssh -F config_path`, which describes the server as `server_id`.

    With `master` False every command makes its own connection. Threads may share one transport.
    """

    def __init__(
        self,
        config_path: Path,
        server_id: str,
        endpoint: Endpoint,
        *,
        master: bool = True,
        report_login: ReportLogin = contextlib.nullcontext,
    ) -> None:
        self.endpoint = endpoint
        self.config_path = config_path
        self._config = str(config_path)
        self._server_id = ssh.check_id(server_id)
        self._master = master
        self._report_login = report_login

    @property
    def control_path(self) -> str:
        """The socket of labctl's master for exactly this server and endpoint; "" without one."""
        if not self._master:
            return ""
        where = repr((self._config, self._server_id, self.endpoint)).encode()
        return str(runtime_dir() / f"own-{hashlib.sha256(where).hexdigest()[:16]}")

    def remote_shell(self) -> RemoteShell:
        retry_rejected_logins(self._ensure_master)
        words = ssh.shell_words(self._config, control_path=self.control_path)
        return RemoteShell(words=tuple(words), host=self._server_id, control_path=self.control_path)

    @contextlib.contextmanager
    def open_sftp(self) -> Iterator[SFTPClient]:
        """SFTP over the shared connection: paramiko's client speaks through an `ssh -s` process."""
        shell = self.remote_shell()
        ours, theirs = socket.socketpair()
        with theirs:
            words = [*shell.words, "-s", shell.host, "sftp"]
            process = subprocess.Popen(
                words, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL
            )
        try:
            with ours, sftp.open_sftp_client(self.endpoint, ours) as client:
                yield client
        finally:
            process.terminate()
            process.wait()

    def close(self) -> None:
        """Stop labctl's master, and with it the commands that other processes run over it."""
        self._control_master("exit")

    def retire(self) -> None:
        """Let labctl's master end with the last command that any process runs over it."""
        self._control_master("stop")

    def _control_master(self, action: str) -> None:
        path = self.control_path
        if path and _is_listening(path):
            argv = ssh.build_control_argv(self._config, self._server_id, action, path)
            spawn_ssh(argv, subprocess.DEVNULL).wait()

    def _execute(self, execution: Execution) -> tuple[int, bytes]:
        return retry_rejected_logins(self._attempt, execution)

    def _attempt(self, execution: Execution) -> tuple[int, bytes]:
        framed = frame(execution.line)
        out = MarkedOutputParser(framed.mark, execution.on_stdout)
        err = MarkedOutputParser(framed.mark, execution.on_stderr, twice=True)
        self._ensure_master()
        process = spawn_ssh(self._argv(framed), subprocess.PIPE)
        with process:
            try:
                with on_cancel(process.kill):
                    if not _pump(process, execution.stdin, (out, err), execution.deadline):
                        raise failures.make_timeout_error(self.endpoint)
                    code = process.wait()
            finally:
                process.kill()
        out.finish()
        err.finish()
        if (code == _SSH_FAILED and not err.ended_255) or code < 0:
            raise self._explain_failure(err)
        return code, out.noise

    def _argv(self, framed: Frame) -> list[str]:
        return ssh.command_argv(
            self._config, self._server_id, framed.line, control_path=self.control_path
        )

    def _explain_failure(self, err: MarkedOutputParser) -> LabError:
        text = err.noise.decode(errors="replace")
        if err.begun:
            return failures.make_link_lost_error(self.endpoint, "")
        if self._master and not text.strip():
            return failures.make_link_lost_error(
                self.endpoint, "it was closed before the command started"
            )
        return failures.parse_ssh_error(self.endpoint, text)

    def _ensure_master(self) -> None:
        """Start a master unless one is running; two processes at the same time start only one."""
        path = self.control_path
        if not path or _is_listening(path):
            return
        # One of at most 256 lock files: removing one that another process waits for would race.
        with _locked(str(runtime_dir() / f"lock-{path[-2:]}")):
            if _is_listening(path):
                return
            Path(path).unlink(missing_ok=True)
            self._start_master(path)

    def _start_master(self, path: str) -> None:
        # A file, not a pipe: the master in the background would hold a pipe open.
        with self._report_login(), tempfile.TemporaryFile() as stderr:
            argv = ssh.master_argv(self._config, self._server_id, path, find_quick_login_options())
            process = spawn_ssh(argv, subprocess.DEVNULL, stderr=stderr)
            try:
                with on_cancel(process.kill):
                    if not _has_exited_within(process, LOGIN_TIMEOUT_S):
                        raise failures.make_unreachable_error(self.endpoint, _LOGIN_TIMED_OUT)
            finally:
                process.kill()
                process.wait()
            stderr.seek(0)
            if process.returncode:
                raise self._explain_no_master(stderr.read())

    def _explain_no_master(self, stderr: bytes) -> LabError:
        """Build the error of a master that did not start, from what ssh printed.

        ssh hides the output of a master's proxy, so with a proxy a plain login is tried for it.
        """
        if self.endpoint.jump or self.endpoint.proxy_command:
            argv = ssh.command_argv(self._config, self._server_id, "true")
            process = spawn_ssh(argv, subprocess.PIPE)
            try:
                _, stderr = process.communicate(timeout=LOGIN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return failures.make_unreachable_error(self.endpoint, _LOGIN_TIMED_OUT)
            finally:
                process.kill()
                process.wait()
        return failures.parse_ssh_error(self.endpoint, stderr.decode(errors="replace"))


def _has_exited_within(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait up to `limit_s`; return whether the process has exited.

    Popen.wait with a timeout sleeps up to 50 ms too long.
    """
    waiter = threading.Thread(target=process.wait, daemon=True)
    waiter.start()
    waiter.join(limit_s)
    return not waiter.is_alive()


def _is_listening(path: str) -> bool:
    """Whether a running process listens on this control socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    # Not state.locks: transports do not import it, and this is on the path of every command, which
    # would have to import filelock.
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _pump(
    process: subprocess.Popen[bytes],
    stdin: Body,
    streams: tuple[MarkedOutputParser, MarkedOutputParser],
    deadline: float | None,
) -> bool:
    """Move bytes until both outputs end; False if the deadline (monotonic) came first.

    A proxy command shares ssh's stderr and may outlive ssh. So once stdout has ended and ssh has
    exited, only what stderr holds by then is still read.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    input_blocks = iterate_blocks(stdin)
    unsent = next(input_blocks, None)
    _enlarge_pipe(process.stdout.fileno())
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, streams[0])
        selector.register(process.stderr, selectors.EVENT_READ, streams[1])
        if unsent is not None:
            _enlarge_pipe(process.stdin.fileno())
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while selector.get_map():
            left_s = math.inf if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                return False
            is_open = process.stdout in selector.get_map()
            has_exited = not is_open and process.poll() is not None
            wait_s = 0 if has_exited else left_s if is_open else min(left_s, _POLL_S)
            ready = _select(selector, wait_s)
            if has_exited and not ready:
                return True
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        unsent = unsent and (
                            _write_some(process.stdin, unsent) or next(input_blocks, None)
                        )
                    except BrokenPipeError:  # the command stopped reading
                        unsent = None
                    if unsent is None:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif chunk := os.read(key.fd, _CHUNK_BYTES):
                    key.data.feed(chunk)
                else:
                    selector.unregister(key.fileobj)
    return True


def _select(
    selector: selectors.BaseSelector, wait_s: float
) -> list[tuple[selectors.SelectorKey, int]]:
    return selector.select(None if wait_s == math.inf else wait_s)


def _enlarge_pipe(descriptor: int) -> None:
    """Enlarge a pipe's buffer, if the system can, so that each side sleeps less often."""
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _write_some(pipe: IO[bytes], data: memoryview) -> memoryview | None:
    """Write as much as the pipe takes; return the rest, None without one."""
    return data[os.write(pipe.fileno(), data) :] or None

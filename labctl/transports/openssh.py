"""The user's own OpenSSH as a transport: one `ssh` process a command, over a shared master.

The master is labctl's, not the one that people type through. It is started on the first command,
lives some idle minutes beyond this process, and is replaced where its socket answers no more.
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
from typing import IO, TYPE_CHECKING, Any

from labctl.commands import ssh
from labctl.errors import LabError
from labctl.model import Endpoint
from labctl.retry import while_turned_away
from labctl.shell import Command
from labctl.transports import Body, RemoteShell, Result, blocks, failures
from labctl.transports.bounded_output import Kept
from labctl.transports.framing import Frame, Unframer, frame
from labctl.transports.ssh_client import quick_login, runtime_dir

if TYPE_CHECKING:
    from paramiko import SFTPClient

LOGIN_TIMEOUT_S = 20.0
_NO_LOGIN = f"no login within {LOGIN_TIMEOUT_S:g} s"
_SSH_FAILED = 255
_CHUNK_BYTES = 256 * 1024
_PIPE_BYTES = 1024 * 1024
_LOOK_AGAIN_S = 0.05


class OpenSshTransport:
    """Runs commands through `ssh -F config_path`, where the server stands under `server_id`.

    With `master` False every command connects by itself. Threads may share one transport.
    """

    def __init__(
        self, config_path: Path, server_id: str, endpoint: Endpoint, *, master: bool = True
    ) -> None:
        self.endpoint = endpoint
        self.config_path = config_path
        self._config = str(config_path)
        self._server_id = ssh.check_id(server_id)
        self._master = master

    @property
    def control_path(self) -> str:
        """Where labctl's master for exactly this server and way listens; "" without one."""
        if not self._master:
            return ""
        where = repr((self._config, self._server_id, self.endpoint)).encode()
        return str(runtime_dir() / f"own-{hashlib.sha256(where).hexdigest()[:16]}")

    def run(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        timeout_s: float | None = 60.0,
        check: bool = True,
    ) -> Result:
        kept = Kept(self.endpoint)
        code, noise = self._execute(line, stdin, timeout_s, kept.out, kept.err)
        result = Result(
            code=code,
            stdout=kept.stdout,
            stderr=kept.stderr,
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

    def remote_shell(self) -> RemoteShell:
        while_turned_away()(self._ensure_master)
        words = ssh.shell_words(self._config, control_path=self.control_path)
        return RemoteShell(words=tuple(words), host=self._server_id, control_path=self.control_path)

    @contextlib.contextmanager
    def open_sftp(self) -> Iterator[SFTPClient]:
        """SFTP over the shared connection: paramiko's client speaks through an `ssh -s` process."""
        import paramiko

        shell = self.remote_shell()
        ours, theirs = socket.socketpair()
        with theirs:
            words = [*shell.words, "-s", shell.host, "sftp"]
            process = subprocess.Popen(
                words, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL
            )
        # The client needs no more of a channel than a socket has; its type says otherwise.
        channel: Any = ours
        try:
            with ours, contextlib.closing(paramiko.SFTPClient(channel)) as sftp:
                yield sftp
        except (paramiko.SSHException, EOFError) as error:
            raise failures.lost(self.endpoint, str(error)) from error
        finally:
            process.terminate()
            process.wait()

    def close(self) -> None:
        """End labctl's master, other processes' commands over it included."""
        path = self.control_path
        if path and _listens(path):
            _spawn(ssh.control_argv(self._config, self._server_id, "exit", path), None).wait()

    def _execute(
        self,
        line: Command | str,
        stdin: Body,
        timeout_s: float | None,
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
    ) -> tuple[int, bytes]:
        """The command's exit code, and what the login shell printed before it began."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return while_turned_away()(self._attempt, line, stdin, deadline, on_stdout, on_stderr)

    def _attempt(
        self,
        line: Command | str,
        stdin: Body,
        deadline: float | None,
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
    ) -> tuple[int, bytes]:
        framed = frame(line)
        out = Unframer(framed.mark, on_stdout)
        err = Unframer(framed.mark, on_stderr, twice=True)
        self._ensure_master()
        process = _spawn(self._argv(framed), subprocess.PIPE)
        with process:
            try:
                if not _pump(process, stdin, (out, err), deadline):
                    raise failures.too_slow(self.endpoint)
                code = process.wait()
            finally:
                process.kill()
        out.finish()
        err.finish()
        if (code == _SSH_FAILED and not err.ended_255) or code < 0:
            raise self._failure(err)
        return code, out.noise

    def _argv(self, framed: Frame) -> list[str]:
        return ssh.command_argv(
            self._config, self._server_id, framed.line, control_path=self.control_path
        )

    def _failure(self, err: Unframer) -> LabError:
        said = err.noise.decode(errors="replace")
        if err.begun:
            return failures.lost(self.endpoint, "")
        if self._master and not said.strip():
            return failures.lost(self.endpoint, "it ended before the command began")
        return failures.of_ssh(self.endpoint, said)

    def _ensure_master(self) -> None:
        """Have a living master. Two processes that come at once start one between them."""
        path = self.control_path
        if not path or _listens(path):
            return
        # One of at most 256 lock files: removing one that another process waits for would race.
        with _locked(str(runtime_dir() / f"lock-{path[-2:]}")):
            if _listens(path):
                return
            Path(path).unlink(missing_ok=True)
            self._start_master(path)

    def _start_master(self, path: str) -> None:
        import tempfile  # not for a connection that is there

        # A file, not a pipe: the master in the background would hold a pipe open.
        with tempfile.TemporaryFile() as said:
            argv = ssh.master_argv(self._config, self._server_id, path, quick_login())
            process = _spawn(argv, subprocess.DEVNULL, stderr=said)
            try:
                if not _ended_within(process, LOGIN_TIMEOUT_S):
                    raise failures.unreachable(self.endpoint, _NO_LOGIN)
            finally:
                process.kill()
                process.wait()
            said.seek(0)
            if process.returncode:
                raise self._explained(said.read())

    def _explained(self, said: bytes) -> LabError:
        """Why no master came up. ssh silences a master's proxy, so a proxy is asked once more."""
        if self.endpoint.jump or self.endpoint.proxy_command:
            argv = ssh.command_argv(self._config, self._server_id, "true")
            process = _spawn(argv, subprocess.PIPE)
            try:
                _, said = process.communicate(timeout=LOGIN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return failures.unreachable(self.endpoint, _NO_LOGIN)
            finally:
                process.kill()
                process.wait()
        return failures.of_ssh(self.endpoint, said.decode(errors="replace"))


def _ignore(_: bytes) -> None:
    pass


def _spawn(
    argv: list[str], pipe: int | None, stderr: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL if pipe is None else pipe
    try:
        return subprocess.Popen(
            argv,
            stdin=quiet,
            stdout=quiet,
            stderr=stderr or quiet,
            # Handed on, not read; ssh's own words are recognised in English.
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise LabError(
            "there is no ssh on this machine",
            why="labctl reaches servers through the system's OpenSSH",
            hint="sudo apt install openssh-client",
        ) from None


def _ended_within(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether it ended in time. Popen's own wait with a limit sleeps up to 50 ms too long."""
    waiting = threading.Thread(target=process.wait, daemon=True)
    waiting.start()
    waiting.join(limit_s)
    return not waiting.is_alive()


def _listens(path: str) -> bool:
    """Whether a living process has this control socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _pump(
    process: subprocess.Popen[bytes],
    stdin: Body,
    streams: tuple[Unframer, Unframer],
    deadline: float | None,
) -> bool:
    """Move bytes until both outputs end; False where the deadline (monotonic) came first.

    A proxy command shares ssh's stderr and may outlive ssh. So once stdout has ended and ssh is
    gone, what stderr holds by then is all that is awaited.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    coming = blocks(stdin)
    left = next(coming, None)
    _widen(process.stdout.fileno())
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, streams[0])
        selector.register(process.stderr, selectors.EVENT_READ, streams[1])
        if left is not None:
            _widen(process.stdin.fileno())
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while selector.get_map():
            left_s = math.inf if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                return False
            heard = process.stdout in selector.get_map()
            gone = not heard and process.poll() is not None
            ready = _ready(selector, 0 if gone else left_s if heard else min(left_s, _LOOK_AGAIN_S))
            if gone and not ready:
                return True
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        left = left and (_write_some(process.stdin, left) or next(coming, None))
                    except BrokenPipeError:  # the command read no further
                        left = None
                    if left is None:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif chunk := os.read(key.fd, _CHUNK_BYTES):
                    key.data.feed(chunk)
                else:
                    selector.unregister(key.fileobj)
    return True


def _ready(
    selector: selectors.BaseSelector, wait_s: float
) -> list[tuple[selectors.SelectorKey, int]]:
    return selector.select(None if wait_s == math.inf else wait_s)


def _widen(descriptor: int) -> None:
    """Let a pipe hold more, where the system can: each side then sleeps less often."""
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _write_some(pipe: IO[bytes], left: memoryview) -> memoryview | None:
    """What is left of it; None where nothing is."""
    return left[os.write(pipe.fileno(), left) :] or None

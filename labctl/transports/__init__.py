"""Transports: run commands on a server. `openssh.py`, `fabric.py` and `fake.py` implement one.

Constructing a transport never touches the network; the first command connects. A server that
cannot be reached raises a subclass of ConnectError, a wrong host key HostKeyError, a rejected key
AuthenticationError.

May import: commands, config, estimate and the layers below.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from labctl.model import Endpoint, Value
from labctl.shell import Command
from labctl.transports import failures
from labctl.transports.bounded_output import BoundedOutput

if TYPE_CHECKING:
    from paramiko import SFTPClient

# A command's standard input: bytes, or a function that starts a new stream of them.
#
# The function is called again if sshd rejected the command before it started. The stream may be
# read in another thread, and must not raise.
Body = bytes | memoryview | Callable[[], Iterator[bytes]]


def iterate_blocks(body: Body) -> Iterator[memoryview]:
    """Yield the bytes of a body in non-empty pieces."""
    for block in body() if callable(body) else (body,):
        if len(block):
            yield memoryview(block)


class Result(Value, frozen=True):
    """The result of a command. `code` is its exit code; output is text, invalid bytes replaced.

    `noise` is what the login shell printed to stdout before the command started (a banner in its
    start-up files). It is removed from `stdout`, but would break scp and sftp.
    """

    code: int
    stdout: str = ""
    stderr: str = ""
    noise: str = ""


class RemoteShell(Value, frozen=True):
    """The argv with which another program reaches the server: `words`, `host`, a line to run.

    `control_path` is the socket of the shared connection, which exists as long as the connection;
    "" without one.
    """

    words: tuple[str, ...]
    host: str
    control_path: str = ""


class Execution(NamedTuple):
    """A line to execute. `deadline` is in seconds of time.monotonic, None without one."""

    line: Command | str
    stdin: Body
    deadline: float | None
    on_stdout: Callable[[bytes], None]
    on_stderr: Callable[[bytes], None]


class Transport(ABC):
    """A way to run commands on one server."""

    endpoint: Endpoint

    def run(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        timeout_s: float | None = 60.0,
        check: bool = True,
    ) -> Result:
        """Run `line` in a POSIX shell and wait. With `check`, a nonzero code is a CommandError.

        Raises LinkLostError within 10 s of a dead link, BusyError after `timeout_s`.
        """
        output = BoundedOutput(self.endpoint)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        code, noise = self._execute(Execution(line, stdin, deadline, output.out, output.err))
        result = Result(
            code=code,
            stdout=output.stdout,
            stderr=output.stderr,
            noise=noise.decode(errors="replace"),
        )
        if check and code:
            raise failures.make_command_error(self.endpoint, str(line), code, result.stderr)
        return result

    def stream(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Run `line`, pass on output as it arrives, return the exit code. Same errors as run."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return self._execute(Execution(line, stdin, deadline, on_stdout, on_stderr or _ignore))[0]

    @abstractmethod
    def _execute(self, execution: Execution) -> tuple[int, bytes]:
        """Run a line; return its exit code, and what the login shell printed before it started."""

    @abstractmethod
    def remote_shell(self) -> RemoteShell | None:
        """Connect and return the shell for rsync; None if other programs cannot connect."""

    @abstractmethod
    def open_sftp(self) -> AbstractContextManager[SFTPClient]:
        """A client for single files. OSError says what the server refuses; data goes by rsync."""

    @abstractmethod
    def close(self) -> None: ...


def _ignore(_: bytes) -> None:
    pass

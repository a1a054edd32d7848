"""How bytes reach a server. One small protocol; `openssh.py`, `fabric.py` and `fake.py` keep it.

Constructing a transport never touches the network; the first command connects. Everything that
cannot be reached raises a ConnectError subclass, a wrong host key HostKeyError, a refused key
AuthenticationError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from labctl.model import Endpoint, Value
from labctl.shell import Command

if TYPE_CHECKING:
    from paramiko import SFTPClient

# What a command reads from its standard input: bytes, or what begins a stream of them anew.
#
# It is begun again where sshd turned the command away before it began, and may be read in another
# thread: a stream must not fail.
Body = bytes | memoryview | Callable[[], Iterator[bytes]]


def blocks(body: Body) -> Iterator[memoryview]:
    """The bytes of a body, piece by piece; none of the pieces is empty."""
    for block in body() if callable(body) else (body,):
        if len(block):
            yield memoryview(block)


class Result(Value, frozen=True):
    """What a command did. `code` is its exit code; output is text, undecodable bytes replaced.

    `noise` is what the login shell printed to stdout before the command began (a banner in its
    start-up files); it is in `stdout` no more, but would disturb scp and sftp.
    """

    code: int
    stdout: str = ""
    stderr: str = ""
    noise: str = ""


class RemoteShell(Value, frozen=True):
    """How another program reaches the server: `words`, then `host`, then a line to run there.

    `control_path` is the socket of the shared connection; it is gone when that is. "" without one.
    """

    words: tuple[str, ...]
    host: str
    control_path: str = ""


class Transport(Protocol):
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
        """Run `line` in a POSIX shell and wait. With `check`, a code above 0 is a CommandError.

        Raises LinkLostError within 10 s of a dead link, BusyError after `timeout_s`.
        """

    def stream(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run `line`, hand over output as it comes, return the exit code. Same errors as run."""

    def remote_shell(self) -> RemoteShell | None:
        """For rsync, after connecting; None where only this object reaches the server."""

    def open_sftp(self) -> AbstractContextManager[SFTPClient]:
        """A client for single files. OSError says what the server refuses; data goes by rsync."""

    def close(self) -> None: ...

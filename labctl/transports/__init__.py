"""How bytes reach a server. One small protocol; `paramiko.py`, `openssh.py` and `fake.py` keep it.

Constructing a transport never touches the network; the first command connects. Everything that
cannot be reached raises a ConnectError subclass, a wrong host key HostKeyError, a refused key
AuthenticationError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from labctl.model import Endpoint, Value
from labctl.shell import Command


class Result(Value, frozen=True):
    """What a command did. `code` is its exit code; output is text, undecodable bytes replaced.

    `noise` is what the login shell printed to stdout before the command began (a banner in its
    start-up files); it is in `stdout` no more, but would disturb rsync and sftp.
    """

    code: int
    stdout: str = ""
    stderr: str = ""
    noise: str = ""


class Transport(Protocol):
    """A way to run commands on one server."""

    endpoint: Endpoint

    def run(
        self,
        line: Command | str,
        *,
        stdin: bytes = b"",
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
        stdin: bytes | memoryview = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run `line`, hand over output as it comes, return the exit code. Same errors as run."""

    def close(self) -> None: ...

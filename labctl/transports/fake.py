"""A scripted server: for tests of flows, and to try labctl without a machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from labctl.errors import LabError
from labctl.model import Endpoint
from labctl.transports import Execution, RemoteShell, Result, Transport, iterate_blocks

if TYPE_CHECKING:
    from paramiko import SFTPClient

# The reply to a line: a result, an error to raise, or a function of the line and its stdin.
Reply = Result | LabError | Callable[[str, bytes], Result]


@dataclass(frozen=True)
class SentCommand:
    """One command as it was sent."""

    line: str
    stdin: bytes = b""


@dataclass
class FakeTransport(Transport):
    """Records every line in `sent` and replies by the first pattern that matches it.

    `replies` are (regular expression, reply), tried in order. A line that no pattern matches is an
    AssertionError: the test's script is incomplete.
    """

    endpoint: Endpoint = field(default_factory=lambda: Endpoint(host="fake.example"))
    replies: list[tuple[str, Reply]] = field(default_factory=list)
    sent: list[SentCommand] = field(default_factory=list)
    closed: bool = False
    shell: RemoteShell | None = None

    def reply(self, pattern: str, reply: Reply | str = "", *, code: int = 0) -> FakeTransport:
        """Add a reply after the others; text means a Result with this stdout and code."""
        result = Result(code=code, stdout=reply) if isinstance(reply, str) else reply
        self.replies.append((pattern, result))
        return self

    @property
    def lines(self) -> list[str]:
        return [each.line for each in self.sent]

    def _execute(self, execution: Execution) -> tuple[int, bytes]:
        result = self._answer(str(execution.line), b"".join(iterate_blocks(execution.stdin)))
        if result.stdout:
            # A script that replies with bytes encodes them as surrogates: os.fsdecode.
            execution.on_stdout(result.stdout.encode(errors="surrogateescape"))
        if result.stderr:
            execution.on_stderr(result.stderr.encode())
        return result.code, result.noise.encode()

    def remote_shell(self) -> RemoteShell | None:
        return self.shell

    def open_sftp(self) -> AbstractContextManager[SFTPClient]:
        raise AssertionError("the script has no files")

    def close(self) -> None:
        self.closed = True

    def _answer(self, line: str, stdin: bytes) -> Result:
        self.sent.append(SentCommand(line, stdin))
        for pattern, reply in self.replies:
            if re.search(pattern, line):
                if isinstance(reply, LabError):
                    raise reply
                return reply if isinstance(reply, Result) else reply(line, stdin)
        raise AssertionError(f"the script has no reply to: {line}")

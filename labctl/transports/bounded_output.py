"""The output of a command, limited in size: on a student's server the student is root."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from labctl.errors import LabError
from labctl.errors.subject import Subject
from labctl.model import Endpoint
from labctl.shell import Command
from labctl.transports import Body, Result, failures

# Limit for both streams of one command together. The list of a million files is smaller.
MOST_BYTES = 128 * 1024**2


class BoundedOutput:
    """Collects both streams of one command; raises LabError above MOST_BYTES."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._size = 0
        self._out: list[bytes] = []
        self._err: list[bytes] = []

    def out(self, block: bytes) -> None:
        self._add(self._out, block)

    def err(self, block: bytes) -> None:
        self._add(self._err, block)

    @property
    def stdout(self) -> str:
        return b"".join(self._out).decode(errors="replace")

    @property
    def stderr(self) -> str:
        return b"".join(self._err).decode(errors="replace")

    def _add(self, stream: list[bytes], block: bytes) -> None:
        self._size += len(block)
        if self._size > MOST_BYTES:
            raise LabError(
                f"a command on {failures.endpoint_text(self._endpoint)} printed more than "
                f"{MOST_BYTES // 1024**2} MiB",
                why="its output is kept in memory, so labctl stopped reading it",
                hint=_render_output_hint,
            )
        stream.append(block)


def _render_output_hint(subject: Subject) -> str:
    to_file = "write the output to a file on the server"
    if subject.kind == "lab":
        return f"{to_file}, then: labctl pull"
    return f"{to_file}; {subject.down} downloads the files of runs"


class Execution(NamedTuple):
    """A line to execute. `deadline` is in seconds of time.monotonic, None without one."""

    line: Command | str
    stdin: Body
    deadline: float | None
    on_stdout: Callable[[bytes], None]
    on_stderr: Callable[[bytes], None]


class BoundedTransport(ABC):
    """`run` and `stream` of a transport that can execute a line with callbacks for its output."""

    endpoint: Endpoint

    def run(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        timeout_s: float | None = 60.0,
        check: bool = True,
    ) -> Result:
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
    ) -> int:
        return self._execute(Execution(line, stdin, None, on_stdout, on_stderr or _ignore))[0]

    @abstractmethod
    def _execute(self, execution: Execution) -> tuple[int, bytes]:
        """Run a line; return its exit code, and what the login shell printed before it started."""


def _ignore(_: bytes) -> None:
    pass

"""A talk in lines with a forced command: one ssh process, its request as it stands.

Unlike a transport's commands nothing is wrapped around the request: whoever forced the command
compares it. The process is started with the first line and lives until `close`.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from labctl.errors import LabError, LinkLostError
from labctl.model import Endpoint
from labctl.retry import while_turned_away
from labctl.transports import failures

END_S = 5.0
SSH_FAILED = 255


class Lines:
    """Threads may share one: each line is answered before the next is sent."""

    def __init__(self, argv: Sequence[str], endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._argv = list(argv)
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None

    def ask(self, line: bytes) -> bytes:
        """The line that answers `line`, with its end.

        A ConnectError where the other side cannot be reached, LinkLostError where it went away in
        between, AuthenticationError or HostKeyError as ssh says; LabError with what it said where
        it answers with no line.
        """
        with self._guard:
            return while_turned_away()(self._ask, line)

    def close(self) -> None:
        process, self._process = self._process, None
        said, self._said = self._said, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was not sent yet has nobody to go to
                    pipe.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if said is not None:
            said.close()

    def _ask(self, line: bytes) -> bytes:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        with suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise self._ended(answer)
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # A file, not a pipe: whoever says much would fill that.
            said = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
            try:
                self._process = subprocess.Popen(
                    self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
                )
            except FileNotFoundError:
                said.close()
                raise LabError(
                    "there is no ssh on this machine",
                    why="labctl reaches a keeper through the system's OpenSSH",
                    hint="sudo apt install openssh-client",
                ) from None
            self._said = said
        return self._process

    def _ended(self, answer: bytes) -> LabError:
        """Why there was no answer, in ssh's own words."""
        process, said = self._process, self._said
        assert process is not None
        assert said is not None
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = 0
        said.seek(0)
        text = said.read().decode(errors="replace")
        self.close()
        if code == SSH_FAILED:
            return failures.of_ssh(self.endpoint, text)
        if answer or text.strip():
            why = (text.strip() or answer.decode(errors="replace"))[-500:]
            return LabError(
                f"{failures.place(self.endpoint)} does not answer as it should", why=why
            )
        return LinkLostError(f"the connection to {failures.place(self.endpoint)} ended")

"""Exchange lines with a forced command over one ssh process.

Unlike the commands of a transport, the request is sent without a frame around it, because the
forced command compares it. The process starts with the first line and lives until `close`.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from labctl.errors import CommandError, LabError, LinkLostError
from labctl.model import Endpoint
from labctl.retry import retry_rejected_logins
from labctl.transports import failures
from labctl.transports.ssh_client import spawn_ssh

END_S = 5.0
SSH_FAILED = 255


class LineChannel:
    """A channel that answers line by line. Threads may share it: one line at a time is sent."""

    def __init__(self, argv: Sequence[str], endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._argv = list(argv)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None

    def exchange(self, line: bytes) -> bytes:
        """Send `line` and return the reply line, including its newline.

        Raises a ConnectError if the other side cannot be reached, LinkLostError if the connection
        ended in between, AuthenticationError or HostKeyError as ssh reports them, and CommandError
        with the output of the other side if it does not reply with a line.
        """
        with self._lock:
            return retry_rejected_logins(self._send_line, line)

    def close(self) -> None:
        process, self._process = self._process, None
        stderr, self._stderr = self._stderr, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # the reader of unsent data may have exited
                    pipe.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if stderr is not None:
            stderr.close()

    def _send_line(self, line: bytes) -> bytes:
        process = self._ensure_process()
        assert process.stdin is not None
        assert process.stdout is not None
        reply = b""
        with suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        if not reply.endswith(b"\n"):
            raise self._explain_end(reply)
        return reply

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # A file, not a pipe: a lot of output would fill a pipe and block the process.
            stderr = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
            try:
                self._process = spawn_ssh(self._argv, subprocess.PIPE, stderr)
            except LabError:
                stderr.close()
                raise
            self._stderr = stderr
        return self._process

    def _explain_end(self, reply: bytes) -> LabError:
        """Build the error of a reply that is not a line, from what ssh printed."""
        process, stderr = self._process, self._stderr
        assert process is not None
        assert stderr is not None
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = 0
        stderr.seek(0)
        text = stderr.read().decode(errors="replace")
        self.close()
        if code == SSH_FAILED:
            return failures.parse_ssh_error(self.endpoint, text)
        if reply or text.strip():
            why = (text.strip() or reply.decode(errors="replace"))[-500:]
            text = f"{failures.endpoint_text(self.endpoint)} sent an invalid reply"
            return CommandError(text, code=code, why=why)
        return LinkLostError(f"the connection to {failures.endpoint_text(self.endpoint)} ended")

"""The output of a command, limited in size: on a student's server the student is root."""

from __future__ import annotations

from labctl.errors import LabError
from labctl.errors.subject import Subject
from labctl.model import Endpoint
from labctl.transports import failures

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
        return f"{to_file}, then:\nlabctl pull"
    return f"{to_file}, then:\n{subject.down}   # downloads the files of runs"

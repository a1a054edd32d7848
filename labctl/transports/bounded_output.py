"""What a command said, kept whole up to a bound: a server may be a student's, who is root there."""

from __future__ import annotations

from labctl.errors import LabError
from labctl.model import Endpoint
from labctl.transports import failures

# Of both streams of one command. The list of a million files has less.
MOST_BYTES = 128 * 1024**2


class Kept:
    """Both streams of one command; LabError at what is more than MOST_BYTES."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._size = 0
        self._out: list[bytes] = []
        self._err: list[bytes] = []

    def out(self, block: bytes) -> None:
        self._keep(self._out, block)

    def err(self, block: bytes) -> None:
        self._keep(self._err, block)

    @property
    def stdout(self) -> str:
        return b"".join(self._out).decode(errors="replace")

    @property
    def stderr(self) -> str:
        return b"".join(self._err).decode(errors="replace")

    def _keep(self, stream: list[bytes], block: bytes) -> None:
        self._size += len(block)
        if self._size > MOST_BYTES:
            raise LabError(
                f"{failures.place(self._endpoint)} answered with more than "
                f"{MOST_BYTES // 1024**2} MiB",
                why="an answer is kept in memory, and this one was not read to its end",
                hint="write it to a file there, and fetch that: labctl pull",
            )
        stream.append(block)

"""Extract a tar archive from a server while it arrives. The server is not trusted."""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from labctl.errors import PolicyError, TransferError
from labctl.parallel import start_daemon
from labctl.wire.tar import TarStream

BLOCK_BYTES = 256 * 1024
MEMBER_HEADER_BYTES = 8 * 1024  # more than the headers and the padding of one file take
# More than the end of an archive, a pipe and a block, which have arrived but are not written yet.
UNWRITTEN_BYTES = 1024**2


class TarExtraction:
    """Writes the files of an archive to the private directory `partial`; `feed` it the archive.

    Only regular files with the names in `paths`, each once and each below "./", are written. Links
    and other files of these names are skipped; PolicyError for any other name. What a file contains
    and how long it is remain for the caller to check: `on_bytes` is called with the bytes of the
    files so far, and may raise to end the transfer.

    A thread parses the archive, since a transport hands on what arrives and the parser asks for
    bytes. Leaving the context waits for it, and raises what it raised: TarError if the archive is
    damaged or ends early, OSError if a file cannot be written.
    """

    def __init__(
        self, partial: Path, paths: Iterable[str], on_bytes: Callable[[int], None]
    ) -> None:
        self.done_bytes = 0
        self._partial = partial
        self._due = {f"./{path}": path for path in paths}
        self._on_bytes = on_bytes
        self._surplus_bytes = UNWRITTEN_BYTES + MEMBER_HEADER_BYTES * len(self._due)
        self._received_bytes = 0
        reading, writing = os.pipe()
        self._archive = os.fdopen(reading, "rb")
        self._pipe = os.fdopen(writing, "wb")

    def __enter__(self) -> TarExtraction:
        self._extraction = start_daemon(self._extract)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        failure = self._extraction.exception()  # waits
        if error is None and failure is not None:
            raise failure

    def feed(self, block: bytes) -> None:
        """Pass on the next bytes of the archive. Raises the errors that leaving would raise."""
        self._received_bytes += len(block)
        try:
            self._pipe.write(block)
        except BrokenPipeError as error:
            raise (self._extraction.exception() or error) from None
        done_bytes = self.done_bytes
        if self._received_bytes - done_bytes > self._surplus_bytes:
            raise TransferError(
                "the server sends more than it announced",
                why="headers of its tar archive that belong to no file",
            )
        self._on_bytes(done_bytes)

    def _extract(self) -> None:
        with self._archive:
            self._extract_members()
            while self._archive.read(BLOCK_BYTES):
                pass  # tar fills its last record with zeros

    def _extract_members(self) -> None:
        stream = TarStream(self._archive)
        for member in stream:
            path = self._due.pop(member.name, None)
            if path is None:
                raise PolicyError(
                    f"the server sent the file {member.name!a}, which labctl did not request",
                    why="a correct tar sends each requested file once; labctl wrote nothing to it",
                    hint="labctl doctor",
                )
            # A file that was replaced by a link or a directory meanwhile counts as missing.
            if member.kind == tarfile.REGTYPE:
                self._write(self._partial / path, stream)

    def _write(self, path: Path, stream: TarStream) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            while block := stream.read(BLOCK_BYTES):
                file.write(block)
                self.done_bytes += len(block)

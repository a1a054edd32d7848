"""Copy files to and from a directory of the server: by rsync if both sides have it, or tar.

Both write to a private staging directory, and the caller verifies what arrived.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from labctl.commands import rsync
from labctl.errors import CommandError, PolicyError, TransferError
from labctl.model import FileEntry, Value
from labctl.servers.agent import AgentClient
from labctl.sync.compression import is_compressible
from labctl.sync.tar_extraction import TarExtraction
from labctl.transports import Transport
from labctl.transports.rsync import CopyResult, RsyncUnusableError, copy, find_program
from labctl.wire.files import FilePart, PartsRequest
from labctl.wire.tar import TarError

LONG_S = 6 * 3600.0  # for large transfers; a dead connection is noticed much earlier
TIMED_FROM_BYTES = 16 * 1024**2  # for less, measuring the speed is not worth a round trip
TIMED_BYTES = 1024**2
SLOW_BYTES_PER_S = 20e6  # zstd compresses at least this fast, beside everything else
BLOCK_BYTES = 512 * 1024
NO_PROGRAM = 127
UNFIT_TAR_CODES = (1, 64, 126, 127)  # no tar, or one that does not know an option
COMPLAINT_BYTES = 300


class Destination(Value, frozen=True):
    """Where files go: `staging` on the server, for the live tree `basis` ("" if none exists).

    `rsync_version` is the output of the server's rsync --version, "" if it has no rsync.
    """

    staging: str
    basis: str = ""
    rsync_version: str = ""


def send_files(
    transport: Transport,
    root: Path,
    files: Sequence[FileEntry],
    destination: Destination,
    on_bytes: Callable[[int], None],
) -> CopyResult:
    """Send `files` (below `root`) to the staging directory, which must exist.

    `on_bytes` is called with the number of bytes done. A file that cannot be read is left out.
    LinkLostError and TransferError keep what has arrived.
    """
    shell = transport.remote_shell() if destination.rsync_version else None
    program = find_program()
    paths = (destination.staging, destination.basis or "/")
    if shell is not None and program.is_usable and all(map(program.can_name, paths)):
        transfer = rsync.Transfer(
            shell_words=shell.words,
            source=f"{root.absolute()}/",
            target=f"{shell.host}:{destination.staging}/",
            basis=destination.basis,
            compression=_choose_compression(transport, program, root, files, destination),
        )
        argv = rsync.transfer_argv(program, transfer)
        names = rsync.name_list(entry.path for entry in files)
        try:
            return copy(transport.endpoint, shell, argv, names, on_bytes)
        except RsyncUnusableError:
            pass  # tar does not need the server's rsync, and a login banner does not disturb it
    return _send_tar(transport, root, files, destination.staging, on_bytes)


class RemoteFolder(Value, frozen=True):
    """A directory of the server to fetch files from; `request` is for their hashes there.

    `directory` is its path, as the server names it.
    """

    remote: AgentClient
    request: PartsRequest
    directory: str
    rsync_version: str = ""


def fetch_files(
    folder: RemoteFolder,
    files: Sequence[FilePart],
    partial: Path,
    basis: Path | None,
    on_bytes: Callable[[int], None],
    on_file: Callable[[str], None],
) -> CopyResult:
    """Fetch `files` of `folder` to the private directory `partial`; their names were checked.

    The server is not trusted: the caller verifies what has arrived. Files in `basis` may share
    content with those on the server. `on_file` is called with the paths of complete files, where
    rsync tells them; they are those of rsync and need a check. Raises the same errors as
    `send_files`.
    """
    directory = folder.directory
    if not directory.startswith("/") or not directory.isprintable():
        raise PolicyError(
            f"the server sent an invalid directory: {directory!a}", hint="labctl doctor"
        )
    transport = folder.remote.transport
    shell = transport.remote_shell() if folder.rsync_version else None
    program = find_program()
    if shell is not None and program.is_usable and program.can_name(directory):
        other = rsync.parse_program(folder.rsync_version)
        transfer = rsync.Transfer(
            shell_words=shell.words,
            source=f"{shell.host}:{directory}/",
            target=f"{partial.absolute()}/",
            basis=str(basis.absolute()) if basis is not None else "",
            compression=_choose_fetch_compression(transport, program, other, files),
            names_files=True,
        )
        argv = rsync.transfer_argv(program, transfer)
        names = rsync.name_list(file.path for file in files)
        with contextlib.suppress(RsyncUnusableError):
            return copy(transport.endpoint, shell, argv, names, on_bytes, on_file)
    return _fetch_tar(folder, files, partial, on_bytes)


def _choose_fetch_compression(
    transport: Transport,
    program: rsync.RsyncProgram,
    other: rsync.RsyncProgram,
    files: Sequence[FilePart],
) -> str:
    """Choose the compression of a fetch, without a sample: on a slow link zstd costs nothing."""
    if "zstd" not in program.compressions & other.compressions:
        return ""
    if sum(file.size for file in files) < TIMED_FROM_BYTES:
        return "zstd"
    started_s = time.monotonic()
    line = f"exec head -c {TIMED_BYTES} /dev/zero"
    transport.stream(line, on_stdout=lambda block: None)
    return "zstd" if TIMED_BYTES / (time.monotonic() - started_s) < SLOW_BYTES_PER_S else ""


def _fetch_tar(
    folder: RemoteFolder,
    files: Sequence[FilePart],
    partial: Path,
    on_bytes: Callable[[int], None],
) -> CopyResult:
    """Fetch files as a tar archive. The server needs GNU tar; busybox's lacks --null.

    The archive has each file at its present length: the caller cuts a log that has grown, and finds
    any other change by size and hash, also where a directory became a link, which tar follows as
    rsync does. Unlike rsync, tar starts a file that was interrupted again; complete ones stay.
    """
    # Without --hard-dereference, the second name of a file would come as a link to the first.
    options = "--hard-dereference --no-recursion --null --files-from=-"
    line = f"exec tar -C {shlex.quote(folder.directory)} -cf - {options}"
    names = rsync.name_list(file.path for file in files)
    complaint = bytearray()
    code = 0
    try:
        with TarExtraction(partial, (file.path for file in files), on_bytes) as extraction:
            code = folder.remote.transport.stream(
                line,
                stdin=names,
                on_stdout=extraction.feed,
                on_stderr=lambda block: complaint.extend(block[: COMPLAINT_BYTES - len(complaint)]),
            )
    except TarError as error:
        raise _make_tar_error(error, code, complaint.decode(errors="replace")) from error
    on_bytes(extraction.done_bytes)
    # With another code, some files were missing or changed. The caller finds them.
    return CopyResult(sent_bytes=extraction.done_bytes)


def _make_tar_error(error: TarError, code: int, complaint: str) -> TransferError:
    """Build the error of an archive that cannot be used. GNU tar completes one if it can run."""
    reasons = (f"the tar archive from the server: {error}", complaint.strip())
    return TransferError(
        "the transfer was cut short",
        why="; ".join(filter(None, reasons)),
        hint="install rsync or GNU tar on the server" if code in UNFIT_TAR_CODES else "",
    )


def _choose_compression(
    transport: Transport,
    program: rsync.RsyncProgram,
    root: Path,
    files: Sequence[FileEntry],
    destination: Destination,
) -> str:
    """Choose zstd if both sides have it, a sample shrinks, and the link is slower than zstd."""
    other = rsync.parse_program(destination.rsync_version)
    if "zstd" not in program.compressions & other.compressions:
        return ""
    if not is_compressible((root / entry.path, entry.size) for entry in files):
        return ""
    if sum(entry.size for entry in files) < TIMED_FROM_BYTES:
        return "zstd"
    return "zstd" if _time_link(transport) < SLOW_BYTES_PER_S else ""


def _time_link(transport: Transport) -> float:
    """Measure the upload speed of the link in bytes per second."""
    noise = os.urandom(TIMED_BYTES)
    started_s = time.monotonic()
    transport.run("exec cat > /dev/null", stdin=noise, timeout_s=LONG_S)
    return TIMED_BYTES / (time.monotonic() - started_s)


def _send_tar(
    transport: Transport,
    root: Path,
    files: Sequence[FileEntry],
    staging: str,
    on_bytes: Callable[[int], None],
) -> CopyResult:
    # -m sets no modification times, so that a partial file is not mistaken for a complete one.
    line = f"umask 022; cd {shlex.quote(staging)} && exec tar -xmf -"
    result = transport.run(
        line, stdin=lambda: tar_stream(root, files, on_bytes), timeout_s=LONG_S, check=False
    )
    if result.code >= NO_PROGRAM:
        raise CommandError("the server's tar ended early", code=result.code, stderr=result.stderr)
    return CopyResult(
        sent_bytes=sum(entry.size for entry in files),
        complaint=result.stderr,
        is_disk_error=result.code != 0,
    )


def tar_stream(
    root: Path, files: Sequence[FileEntry], on_bytes: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield `files` as one tar archive. Never fails: unreadable content is sent as zeros."""
    done = 0
    for entry in files:
        member = tarfile.TarInfo(f"./{entry.path}")
        member.size = entry.size
        yield member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        for block in _contents(root / entry.path, entry.size):
            yield block
            done += len(block)
            on_bytes(done)
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _contents(path: Path, size: int) -> Iterator[bytes]:
    """Yield exactly `size` bytes of the file, padded with zeros."""
    left_bytes = size
    try:
        with path.open("rb", buffering=0) as file:
            while left_bytes and (block := file.read(min(BLOCK_BYTES, left_bytes))):
                left_bytes -= len(block)
                yield block
    except OSError:
        pass  # deleted or unreadable by now: the receiver's hash check finds the difference
    while left_bytes:
        zeros = bytes(min(BLOCK_BYTES, left_bytes))
        left_bytes -= len(zeros)
        yield zeros

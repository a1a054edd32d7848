"""Files on their way home: into a partial directory of our own, and checked on the disk.

rsync guards the transfer with a checksum of its own. What counts is what the disk has: it is
synced, read back from there, and compared with the hash that the server promised. A file for which
none was promised is hashed by the server while it travels.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from labctl.errors import DiskFullError, TransferError
from labctl.events import Progress, Reporter
from labctl.model import Value
from labctl.servers.agent import KEPT, Remote, resumable
from labctl.sync.durability import hash_on_disk, sync_files
from labctl.sync.file_transfer import LONG_S, FetchedFile, RemoteFolder, fetch_files
from labctl.sync.scan import hash_file

RESERVE_BYTES = 64 * 1024**2
SURPLUS_BYTES = RESERVE_BYTES // 2  # so much more than was promised may come before it is stopped


class Due(Value, frozen=True):
    """A file that the server promises; without a `sha256`, that comes when the file has come.

    A `growing` one counts up to `size` bytes only. `identity` is that of the file here whose
    content was found right on the disk.
    """

    path: str
    size: int
    sha256: str
    growing: bool = False
    identity: tuple[int, int, int] | None = None


def renamed_identity(found: os.stat_result) -> tuple[int, int, int]:
    """What a rename leaves as it is, and a change of the contents does not."""
    return found.st_size, found.st_mtime_ns, found.st_ino


def confirm(partial: Path, came: Iterable[Due]) -> tuple[list[Due], list[Due]]:
    """Sync the files that came to `partial`, and hash what the disk has of them.

    (those that are as promised, with their identity; those that are not, and are gone).
    TransferError where the disk fails.
    """
    due = list(came)
    if due:
        sync_files(partial, [partial / one.path for one in due])
    good, bad = [], []
    for one in due:
        path = partial / one.path
        with contextlib.suppress(OSError):  # a disk that cannot read it does not have it
            sha256, found = hash_on_disk(path)
            if (sha256, found.st_size) == (one.sha256, one.size):
                good.append(msgspec.structs.replace(one, identity=renamed_identity(found)))
                continue
        path.unlink(missing_ok=True)
        bad.append(one)
    return good, bad


class Download:
    """Brings files of one directory of the server to `partial`, and goes on after a cut.

    `request` says to verbs of the server's program which directory `folder` is. Files in `basis`
    are what theirs may begin like, None without them. `sent_bytes` are those that had to travel in
    the last `fetch`.
    """

    def __init__(
        self,
        remote: Remote,
        request: dict[str, Any],
        folder: RemoteFolder,
        partial: Path,
        *,
        basis: Path | None,
        reporter: Reporter,
        name: str,
        hint: str,
    ) -> None:
        self.remote = remote
        self.request = request
        self.folder = folder
        self.partial = partial
        self.basis = basis
        self.reporter = reporter
        self.name = name
        self.hint = hint
        self.sent_bytes = 0

    def fetch(self, due: Sequence[Due]) -> tuple[list[Due], list[Due]]:
        """Bring `due`: (those that are on the disk here, with their hashes; those that did not
        come, or different).

        DiskFullError before anything has come where the room is short, else in the middle;
        LinkLostError and TransferError leave what has arrived for the next time.
        """
        self.sent_bytes = 0
        if not due:
            return [], []
        wanted = {one.path for one in due}
        _clear(self.partial, wanted)
        self._require_room(due)
        missing = [one for one in due if not self._has_arrived(one)]
        hashes = _ServerHashes(self.remote, self.request, [one for one in due if not one.sha256])
        with self._room(), resumable(self.hint):
            if missing:
                self._transfer(missing)
                _clear(self.partial, wanted)
            promised = {one.path: one.sha256 for one in due} | hashes.wait()
        came, bad = [], []
        for one in due:
            if promised[one.path] and self._trim(one):
                came.append(msgspec.structs.replace(one, sha256=promised[one.path]))
            else:
                bad.append(one)
        good, spoiled = confirm(self.partial, came)
        return good, [*bad, *spoiled]

    def _transfer(self, missing: Sequence[Due]) -> None:
        total = sum(one.size for one in missing)
        most = total + SURPLUS_BYTES + sum(one.size for one in missing if one.growing)

        def tell(done: int) -> None:
            if done > most:
                raise TransferError(
                    "the server sends more than it promised",
                    why=f"{_mib(done)} MiB came, {_mib(total)} MiB were to come",
                )
            if done < total:
                self._progress(done, total)

        files = [FetchedFile(path=one.path, size=one.size) for one in missing]
        copied = fetch_files(
            self.remote, self.request, self.folder, self.partial, self.basis, files, tell
        )
        self.sent_bytes = copied.sent_bytes
        if copied.is_disk_error:
            raise self._disk_error(copied.complaint)
        self._progress(total, total)

    def _disk_error(self, complaint: str) -> TransferError:
        why = complaint.strip()[-300:]
        hint = f"make room, then {self.hint}  ({KEPT})"
        if shutil.disk_usage(self.partial).free < RESERVE_BYTES:
            return DiskFullError("the disk of this machine is full", why=why, hint=hint)
        return TransferError("a file could not be written or read", why=why)

    def _has_arrived(self, due: Due) -> bool:
        """Whether an earlier try has brought it whole, as far as is known before the transfer."""
        path = self.partial / due.path
        if not due.sha256 or not path.is_file() or path.stat().st_size != due.size:
            return False
        return hash_file(path) == due.sha256

    def _trim(self, due: Due) -> bool:
        """Whether it came, as long as it was promised; a growing one loses what it has more."""
        path = self.partial / due.path
        try:
            size = path.lstat().st_size
            if due.growing and size > due.size:
                os.truncate(path, due.size)
                size = due.size
        except OSError:
            return False
        return size == due.size

    def _require_room(self, due: Sequence[Due]) -> None:
        """DiskFullError where so many bytes have no room."""
        total = sum(max(0, one.size - _size(self.partial / one.path)) for one in due)
        free = shutil.disk_usage(self.partial).free
        if total + RESERVE_BYTES > free:
            raise DiskFullError(
                "there is no room here for the results",
                why=f"{_mib(total)} MiB are to come, {_mib(free)} MiB are free at "
                f"{self.partial.parent}, and {_mib(RESERVE_BYTES)} are kept free",
                hint=f"make room, then {self.hint}  (nothing was brought)",
            )

    def _progress(self, done: int, total: int) -> None:
        self.reporter.emit(Progress(name=self.name, done=done, total=total, unit="bytes"))

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            hint = f"make room, then {self.hint}  ({KEPT})"
            raise DiskFullError(
                "the disk of this machine is full", why=str(error), hint=hint
            ) from error


class _ServerHashes:
    """The server's hashes of files for which it promised none, taken while they travel."""

    def __init__(self, remote: Remote, request: dict[str, Any], due: Sequence[Due]) -> None:
        self.remote = remote
        self.paths = [one.path for one in due]
        self.request = {**request, "parts": [[one.path, one.size] for one in due]}
        self.hashes: dict[str, str] = {}
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._ask, daemon=True)
        if due:
            self.thread.start()

    def wait(self) -> dict[str, str]:
        """Hashes by path, "" for a file that is no longer what the server named."""
        if self.paths:
            self.thread.join()
        if self.error is not None:
            raise self.error
        return self.hashes

    def _ask(self) -> None:
        try:
            reply = self.remote.call("hashes", self.request, timeout_s=LONG_S)
            self.hashes = dict(zip(self.paths, reply["sha256"], strict=True))
        except BaseException as error:  # raised again in `wait`, by the thread that pulls
            self.error = error


def _clear(partial: Path, wanted: set[str]) -> None:
    """Have a private directory with nothing in it but `wanted`, as regular files of one name each.

    Whatever a server has sent, nothing here is written or read through a link.
    """
    if partial.is_symlink():
        partial.unlink()
    partial.mkdir(parents=True, exist_ok=True)
    partial.chmod(0o700)
    for folder, folders, names in os.walk(partial, topdown=False):
        for path in (Path(folder) / name for name in (*folders, *names)):
            found = path.lstat()
            is_wanted = str(path.relative_to(partial)) in wanted
            if not stat.S_ISDIR(found.st_mode):
                if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or not is_wanted:
                    path.unlink()
            elif is_wanted or not any(path.iterdir()):
                shutil.rmtree(path)


def _size(path: Path) -> int:
    return path.lstat().st_size if path.is_file() else 0


def _mib(size: int) -> int:
    return -(-size // 1024**2)

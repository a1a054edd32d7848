"""Download files from the server into a private partial directory, and verify them on the disk.

rsync checks the transfer with its own checksum. In addition, each file is synced, read back from
the disk, and compared with the hash that the server announced: large files while later ones still
travel. Files without an announced hash are hashed by the server during the transfer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from labctl.errors import DiskFullError, TransferError
from labctl.events import Progress, Reporter
from labctl.model import Value
from labctl.parallel import start_daemon
from labctl.servers.agent import KEPT, add_resume_hint
from labctl.sync.background_hashes import BackgroundHasher
from labctl.sync.durability import hash_on_disk, sync_files
from labctl.sync.file_transfer import LONG_S, RemoteFolder, fetch_files
from labctl.sync.scan import hash_file
from labctl.text import bytes_text
from labctl.wire.files import HASHES, FilePart

RESERVE_BYTES = 64 * 1024**2
SURPLUS_BYTES = RESERVE_BYTES // 2  # a server may send this much more than announced, then stops


class AnnouncedFile(Value, frozen=True):
    """A file that the server announced. An empty `sha256` follows after the transfer.

    Of a `growing` file, only the first `size` bytes count. `identity` is that of the local file
    whose content was verified on the disk.
    """

    path: str
    size: int
    sha256: str
    growing: bool = False
    identity: tuple[int, int, int] | None = None


def rename_stable_identity(status: os.stat_result) -> tuple[int, int, int]:
    """Return what a rename leaves unchanged and a change of the contents does not."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def verify_files(
    partial: Path, came: Iterable[AnnouncedFile], hasher: BackgroundHasher | None = None
) -> tuple[list[AnnouncedFile], list[AnnouncedFile]]:
    """Sync the files received in `partial`, and hash what the disk has of them.

    `hasher` may have hashed some during the transfer. Returns (files with the announced hash, with
    their identity; other files, now deleted). TransferError if the disk fails.
    """
    due = list(came)
    hashed = {file.path: hasher.find(file.path) if hasher else None for file in due}
    if unsynced := [partial / path for path, found in hashed.items() if found is None]:
        sync_files(partial, unsynced)
    good, bad = [], []
    for file in due:
        path = partial / file.path
        with contextlib.suppress(OSError):  # a file that cannot be read back was not stored
            sha256, status = hashed[file.path] or hash_on_disk(path)
            if (sha256, status.st_size) == (file.sha256, file.size):
                good.append(msgspec.structs.replace(file, identity=rename_stable_identity(status)))
                continue
        path.unlink(missing_ok=True)
        bad.append(file)
    return good, bad


class Download:
    """Downloads files of one directory of the server to `partial`; a new call resumes.

    Files in `basis` may share content with those on the server; None without such files.
    `sent_bytes` counts what the last `fetch` had to transfer.
    """

    def __init__(
        self,
        folder: RemoteFolder,
        partial: Path,
        *,
        basis: Path | None,
        reporter: Reporter,
        name: str,
        hint: str,
    ) -> None:
        self.folder = folder
        self.partial = partial
        self.basis = basis
        self.reporter = reporter
        self.name = name
        self.hint = hint
        self.sent_bytes = 0

    def fetch(
        self, due: Sequence[AnnouncedFile]
    ) -> tuple[list[AnnouncedFile], list[AnnouncedFile]]:
        """Download `due`; return (verified files, with their hashes; missing or different files).

        DiskFullError before the transfer if the disk is too small, or during it. LinkLostError and
        TransferError keep what has arrived for the next call.
        """
        self.sent_bytes = 0
        if not due:
            return [], []
        paths = {file.path for file in due}
        _clear(self.partial, paths)
        self._require_space(due)
        missing = [file for file in due if not self._has_arrived(file)]
        unhashed = [file for file in due if not file.sha256]
        hashes = start_daemon(lambda: _fetch_hashes(self.folder, unhashed))
        sizes = {file.path: file.size for file in missing}
        # rsync writes a new file from its start to its end, then names it.
        hasher = BackgroundHasher(self.partial, sizes, follow=bool(self.folder.rsync_version))
        with self._report_full_disk(), add_resume_hint(self.hint):
            if missing:
                with hasher:
                    self._transfer(missing, hasher.add)
                _clear(self.partial, paths)
            announced = {file.path: file.sha256 for file in due} | hashes.result()
        received, bad = [], []
        for file in due:
            if announced[file.path] and self._trim(file):
                received.append(msgspec.structs.replace(file, sha256=announced[file.path]))
            else:
                bad.append(file)
        good, corrupt = verify_files(self.partial, received, hasher)
        return good, [*bad, *corrupt]

    def _transfer(self, missing: Sequence[AnnouncedFile], on_file: Callable[[str], None]) -> None:
        total = sum(file.size for file in missing)
        limit = total + SURPLUS_BYTES + sum(file.size for file in missing if file.growing)

        def on_bytes(done: int) -> None:
            if done > limit:
                raise TransferError(
                    "the server sends more than it announced",
                    why=f"received {bytes_text(done)}, expected {bytes_text(total)}",
                )
            if done < total:
                self._progress(done, total)

        files = [FilePart(file.path, file.size) for file in missing]
        copied = fetch_files(self.folder, files, self.partial, self.basis, on_bytes, on_file)
        self.sent_bytes = copied.sent_bytes
        if copied.is_disk_error:
            raise self._make_disk_error(copied.complaint)
        self._progress(total, total)

    def _make_disk_error(self, complaint: str) -> TransferError:
        why = complaint.strip()[-300:]
        hint = self._suggest_space(KEPT)
        if shutil.disk_usage(self.partial).free < RESERVE_BYTES:
            return DiskFullError("the disk of this machine is full", why=why, hint=hint)
        return TransferError("a file could not be written or read", why=why)

    def _has_arrived(self, due: AnnouncedFile) -> bool:
        """Whether an earlier transfer has already completed the file."""
        path = self.partial / due.path
        if not due.sha256 or not path.is_file() or path.stat().st_size != due.size:
            return False
        return hash_file(path) == due.sha256

    def _trim(self, due: AnnouncedFile) -> bool:
        """Whether the file has the announced size; a growing one is truncated to it."""
        path = self.partial / due.path
        try:
            size = path.lstat().st_size
            if due.growing and size > due.size:
                os.truncate(path, due.size)
                size = due.size
        except OSError:
            return False
        return size == due.size

    def _require_space(self, due: Sequence[AnnouncedFile]) -> None:
        """DiskFullError if the files do not fit on the disk."""
        total = sum(
            max(0, file.size - _get_local_size_bytes(self.partial / file.path)) for file in due
        )
        free = shutil.disk_usage(self.partial).free
        if total + RESERVE_BYTES > free:
            raise DiskFullError(
                "not enough disk space on this machine for the results",
                why=f"the download needs {bytes_text(total)}; {self.partial.parent} has "
                f"{bytes_text(free)} free, and labctl leaves {bytes_text(RESERVE_BYTES)} free",
                hint=self._suggest_space("nothing was downloaded"),
            )

    def _suggest_space(self, note: str) -> str:
        """Return the commands that show the disk's use, and that repeat the download."""
        show = f"df -h {shlex.quote(str(self.partial.parent))}"
        return f"{show}\n{self.hint}   # once there is space; {note}"

    def _progress(self, done: int, total: int) -> None:
        if total:  # a bar for an empty log would never be full, and so stay on the screen
            self.reporter.emit(Progress(name=self.name, done=done, total=total, unit="bytes"))

    @contextlib.contextmanager
    def _report_full_disk(self) -> Iterator[None]:
        """Turn an OSError about a full disk into a DiskFullError."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            hint = self._suggest_space(KEPT)
            raise DiskFullError(
                "the disk of this machine is full", why=str(error), hint=hint
            ) from error


def _fetch_hashes(folder: RemoteFolder, due: Sequence[AnnouncedFile]) -> dict[str, str]:
    """Return the server's hashes by path, "" for a file that changed since it was announced."""
    if not due:
        return {}
    parts = tuple(FilePart(file.path, file.size) for file in due)
    request = folder.request._replace(parts=parts)
    reply = folder.remote.call(HASHES, request, timeout_s=LONG_S)
    return dict(zip((file.path for file in due), reply.sha256, strict=True))


def _clear(partial: Path, wanted: set[str]) -> None:
    """Make `partial` a private directory that holds only `wanted`, without any links.

    Hard links go too: whatever a server has sent, nothing is written or read through a link.
    """
    if partial.is_symlink():
        partial.unlink()
    partial.mkdir(parents=True, exist_ok=True)
    partial.chmod(0o700)
    for folder, folders, names in os.walk(partial, topdown=False):
        for path in (Path(folder) / name for name in (*folders, *names)):
            status = path.lstat()
            is_wanted = str(path.relative_to(partial)) in wanted
            if not stat.S_ISDIR(status.st_mode):
                if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or not is_wanted:
                    path.unlink()
            elif is_wanted or not any(path.iterdir()):
                shutil.rmtree(path)


def _get_local_size_bytes(path: Path) -> int:
    return path.lstat().st_size if path.is_file() else 0

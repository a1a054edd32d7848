"""Import of runs and edited code from the disk of an earlier server of the lab.

The disk is mounted read-only, as root. A run is copied to a staging directory and renamed into
place, so that a kill at any moment leaves only complete runs; the next call continues. Nothing
here is replaced, except code that nobody has edited on this server.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ...wire.files import RESTORE_DISK, PushedRecord, RestoreDiskReply, RestoreDiskRequest
from ..host.paths import (
    NAME,
    count_free_bytes,
    hash_file,
    lab_dir,
    labctl_home,
    read_text,
    resolve_inside,
)
from ..host.sudo import call_as_root, can_sudo
from ..reply import Failure
from ..runs.records import read_last_attempt
from .files import RESERVE_BYTES, is_by_product, walk
from .records import Record, read_hashes, read_records, write_records

MOUNTS = Path("/run/labctl-kept")
# The second way is for XFS, which refuses two disks of one UUID: disks of one image have the same.
WAYS = ("ro,nosuid,nodev,noexec", "ro,nosuid,nodev,noexec,nouuid")
DEVICE_S = 60.0
POLL_S = 0.1
STAGING = ".restoring-"
PUSHED = ".pushed-code.json"
SAVED = "saved-edits.json"


def restore(request: RestoreDiskRequest) -> RestoreDiskReply:
    """Copy from a disk what it holds of this lab and this server lacks.

    Failure (missing) if the device does not appear, (disk) if there is not enough room.
    """
    lab_dir(request.lab, request.lab_id)
    uid, gid, home = request.uid, request.gid, request.home
    if uid is None or gid is None or os.geteuid() != 0:
        uid, gid, home = os.getuid(), os.getgid(), str(Path.home())
    if os.geteuid() != 0 and can_sudo():
        repeated = request._replace(uid=uid, gid=gid, home=home)
        return call_as_root(RESTORE_DISK, repeated)
    if os.geteuid() != 0:
        what = "mounting a disk requires root on this server"
        raise Failure("policy", what, "", "labctl doctor")
    MOUNTS.mkdir(mode=0o700, exist_ok=True)
    with (MOUNTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for partition in _partitions(request.device):
            with _mount(partition, MOUNTS / "disk") as mounted:
                old_lab = mounted and _find_lab(mounted, request.lab_id, Path(home))
                if old_lab:
                    lab = lab_dir(request.lab, request.lab_id)
                    importer = DiskImport(old_lab, lab, uid, gid)
                    return importer.import_lab_files(Path(request.device).name)
    return RestoreDiskReply((), 0, 0, ())


def _partitions(device: str) -> list[str]:
    """List the partitions of a disk that was just attached, or the disk itself without any."""
    deadline = time.monotonic() + DEVICE_S
    while not Path(device).exists():
        if time.monotonic() > deadline:
            raise Failure(
                "missing", f"the disk {device} did not appear on the server", "", "labctl up"
            )
        time.sleep(POLL_S)
    if shutil.which("udevadm"):
        subprocess.run(["udevadm", "settle", "--timeout=20"], capture_output=True, check=False)
    folder, name = Path(device).parent, Path(device).name
    parts = {*folder.glob(f"{name}-part*"), *folder.glob(f"{name}[0-9]*")}
    return [*sorted(map(str, parts)), device]


@contextmanager
def _mount(partition: str, mountpoint: Path) -> Iterator[Path | None]:
    """Mount the partition and yield `mountpoint`, or None if it cannot be mounted."""
    _unmount(mountpoint)
    mountpoint.mkdir(exist_ok=True)
    is_mounted = any(_run_quietly("mount", "-o", way, partition, str(mountpoint)) for way in WAYS)
    try:
        yield mountpoint if is_mounted else None
    finally:
        _unmount(mountpoint)


def _unmount(mountpoint: Path) -> None:
    """Unmount everything mounted there, for example after a kill."""
    while _run_quietly("umount", str(mountpoint)):
        pass


def _run_quietly(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _find_lab(mounted: Path, lab_id: str, account_home: Path) -> Path | None:
    """Return the lab's most recently used directory on a mounted disk, never through links."""
    homes = {*mounted.glob("home/*"), mounted / "root", mounted / str(account_home).lstrip("/")}
    labs = [
        mark.parent.parent
        for user_home in homes
        for mark in user_home.glob("labctl/*/.labctl/id")
        if mark.resolve() == mark and read_text(mark) == lab_id
    ]
    return max(labs, key=lambda lab: lab.stat().st_mtime, default=None)


class DiskImport:
    """An import from `old`, a lab's directory on another disk, to `here`, owned by the account."""

    def __init__(self, old: Path, here: Path, uid: int, gid: int) -> None:
        self.old = old
        self.here = here
        self.uid = uid
        self.gid = gid
        self.files = self.bytes = 0

    def import_lab_files(self, disk: str) -> RestoreDiskReply:
        runs = self._list_missing_runs()
        self._require_room(runs)
        for run in runs:
            self._copy_run(run, disk)
        edits = list(self._copy_edits(disk))
        os.sync()
        names = tuple(run.name for run in runs)
        return RestoreDiskReply(names, self.files, self.bytes, tuple(edits))

    def _list_missing_runs(self) -> list[Path]:
        candidates = sorted((self.old / "runs").glob("[a-z0-9]*"))
        # A run's container could have replaced a directory that labctl writes to by a link.
        runs = [
            run
            for run in candidates
            if NAME.fullmatch(run.name) and _is_directory(run) and _is_directory(run / ".labctl")
        ]
        return [run for run in runs if not (self.here / "runs" / run.name).exists()]

    def _require_room(self, runs: list[Path]) -> None:
        size = sum(path.lstat().st_size for run in runs for path in walk(run))
        free = count_free_bytes(self.here)
        if size + RESERVE_BYTES > free:
            why = f"they need {size} bytes, and {free} bytes are free"
            raise Failure("disk", "the server's disk has no room for the results", why)

    def _copy_run(self, run: Path, disk: str) -> None:
        runs = self.here / "runs"
        self._make_directory(runs)
        staging = runs / f"{STAGING}{run.name}"
        shutil.rmtree(staging, ignore_errors=True)
        self._copy_tree(run, staging)
        record = {"disk": disk, "container": read_last_attempt(staging).container}
        self._write_json(staging / ".labctl" / "restored.json", record)
        staging.rename(runs / run.name)

    def _copy_tree(self, source: Path, target: Path) -> None:
        target.mkdir()
        for entry in os.scandir(source):
            path = target / entry.name
            if entry.is_symlink():
                path.symlink_to(os.readlink(entry.path))
                self._change_owner(path)
            elif entry.is_dir():
                self._copy_tree(Path(entry.path), path)
            elif entry.is_file():
                self._copy_file(Path(entry.path), path)
        shutil.copystat(source, target)
        self._change_owner(target)

    def _copy_file(self, source: Path, target: Path) -> None:
        if target.is_symlink():
            target.unlink()
        try:
            shutil.copyfile(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            what = f"could not read {source.name} from the disk"
            raise Failure("disk", what, str(error), "labctl orphans") from None
        shutil.copystat(source, target)
        target.chmod(stat.S_IMODE(target.stat().st_mode) & 0o777)
        self._change_owner(target)
        self.files += 1
        self.bytes += target.stat().st_size
        with suppress(FileNotFoundError):
            os.utime(labctl_home() / ".used")

    def _copy_edits(self, disk: str) -> Iterator[str]:
        """Copy code that was edited on the disk; under another name if it was edited here too."""
        old, new = self.old / "code", self.here / "code"
        pushed = read_records(PushedRecord, self.old / ".labctl" / PUSHED)
        record = read_records(PushedRecord, self.here / ".labctl" / PUSHED)
        for path in walk(old):
            name = str(path.relative_to(old))
            sha256 = _hash_if_edited(path, pushed.get(name))
            if not sha256 or is_by_product(name):
                continue
            target = resolve_inside(new, name)
            present = _hash(target)
            pushed_here = record[name].sha256 if name in record else ""
            edited_here = present not in ("", sha256, pushed_here)
            if name in pushed:
                record.setdefault(name, pushed[name])
            if edited_here:
                target = target.with_name(f"{target.name}.from-{disk.rpartition('_')[2]}")
            if sha256 == _hash(target):
                continue
            self._make_directory(target.parent)
            self._copy_file(path, target)
            yield str(target.relative_to(new))
        self._write_json(self.here / ".labctl" / PUSHED, record)
        saved = read_hashes(self.old / ".labctl" / SAVED)
        if saved:
            merged = {**saved, **read_hashes(self.here / ".labctl" / SAVED)}
            self._write_json(self.here / ".labctl" / SAVED, merged)

    def _write_json(self, path: Path, body: Mapping[str, Record]) -> None:
        self._make_directory(path.parent)
        write_records(path, body)
        self._change_owner(path)

    def _make_directory(self, path: Path) -> None:
        """Create the directory and its parents if missing, owned by the account."""
        if not path.is_dir():
            self._make_directory(path.parent)
            path.mkdir()
            self._change_owner(path)

    def _change_owner(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid, follow_symlinks=False)


def _hash(path: Path) -> str:
    """Return the hash of a file: "" if absent, a constant for anything but a regular file."""
    if path.is_file() and not path.is_symlink():
        return hash_file(path)
    return "no file" if os.path.lexists(path) else ""


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _hash_if_edited(path: Path, pushed: PushedRecord | None) -> str:
    """Return the hash of a file that differs from what a push brought, "" for any other."""
    status = path.lstat()
    if pushed and pushed[1:] == (status.st_size, status.st_mtime_ns):
        return ""
    sha256 = hash_file(path)
    return "" if pushed and sha256 == pushed.sha256 else sha256

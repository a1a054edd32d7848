"""What an earlier server of the lab held, from its disk: runs that are not here, and edited code.

The disk is mounted read-only, as root. A run is copied beside the others and renamed into place, so
that a kill at any moment leaves whole runs only; the next call goes on. What is here is never
replaced, but for code that nobody has edited here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..host.paths import (
    NAME,
    free_bytes,
    home,
    inside,
    lab_dir,
    read_json,
    read_text,
    sha256_of,
    write_json,
)
from ..host.sudo import account, as_root, may_sudo
from ..reply import Failure
from ..runs.run_state import last_attempt
from .files import BYTECODE, RESERVE_BYTES, walk

MOUNTS = Path("/run/labctl-kept")
# XFS refuses a second disk of one UUID, which disks of one image have.
WAYS = ("ro,nosuid,nodev,noexec", "ro,nosuid,nodev,noexec,nouuid")
DEVICE_S = 60.0
POLL_S = 0.1
STAGING = ".restoring-"
PUSHED = ".pushed-code.json"
SAVED = "saved-edits.json"


def restore(request: dict[str, Any]) -> dict[str, Any]:
    """Bring here what the disk "device" holds of this lab.

    Replies the "runs" that came, "files" and "bytes" altogether, and the "edits" (paths below the
    code). Failure "missing" where the device does not appear, "disk" where there is no room.
    """
    lab_dir(request["lab"], request["lab_id"])
    request = {**request, **account(request)}
    if os.geteuid() != 0 and may_sudo():
        return as_root("restore", request)
    if os.geteuid() != 0:
        raise Failure("policy", "a disk cannot be mounted without root here", "", "labctl doctor")
    MOUNTS.mkdir(mode=0o700, exist_ok=True)
    with (MOUNTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for partition in _partitions(request["device"]):
            with _mounted(partition, MOUNTS / "disk") as top:
                old = top and _lab_on(top, request["lab_id"], Path(request["home"]))
                if old:
                    here = lab_dir(request["lab"], request["lab_id"])
                    taking = Taking(old, here, request["uid"], request["gid"])
                    return taking.all(Path(request["device"]).name)
    return {"runs": [], "files": 0, "bytes": 0, "edits": []}


def _partitions(device: str) -> list[str]:
    """The partitions of a disk that was just attached, or the disk itself where it has none."""
    deadline = time.monotonic() + DEVICE_S
    while not Path(device).exists():
        if time.monotonic() > deadline:
            raise Failure("missing", f"the disk {device} does not appear", "", "labctl up")
        time.sleep(POLL_S)
    if shutil.which("udevadm"):
        subprocess.run(["udevadm", "settle", "--timeout=20"], capture_output=True, check=False)
    folder, name = Path(device).parent, Path(device).name
    parts = {*folder.glob(f"{name}-part*"), *folder.glob(f"{name}[0-9]*")}
    return [*sorted(map(str, parts)), device]


@contextmanager
def _mounted(partition: str, place: Path) -> Iterator[Path | None]:
    """`place` with the partition on it, None where that is none that can be mounted."""
    _unmount(place)
    place.mkdir(exist_ok=True)
    done = any(_quiet("mount", "-o", way, partition, str(place)) for way in WAYS)
    try:
        yield place if done else None
    finally:
        _unmount(place)


def _unmount(place: Path) -> None:
    """Whatever is mounted there, as after a kill; once more than needed is fine."""
    while _quiet("umount", str(place)):
        pass


def _quiet(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _lab_on(top: Path, lab_id: str, person: Path) -> Path | None:
    """The lab's directory on a mounted disk, the one used last; links lead nowhere here."""
    homes = {*top.glob("home/*"), top / "root", top / str(person).lstrip("/")}
    found = [
        mark.parent.parent
        for each in homes
        for mark in each.glob("labctl/*/.labctl/id")
        if mark.resolve() == mark and read_text(mark) == lab_id
    ]
    return max(found, key=lambda lab: lab.stat().st_mtime, default=None)


class Taking:
    """From `old`, a lab's directory elsewhere, to `here`; all of it will belong to the account."""

    def __init__(self, old: Path, here: Path, uid: int, gid: int) -> None:
        self.old = old
        self.here = here
        self.uid = uid
        self.gid = gid
        self.files = self.bytes = 0

    def all(self, disk: str) -> dict[str, Any]:
        runs = self._lacking()
        self._room(runs)
        for run in runs:
            self._run(run, disk)
        edits = list(self._edits(disk))
        os.sync()
        return {
            "runs": [run.name for run in runs],
            "files": self.files,
            "bytes": self.bytes,
            "edits": edits,
        }

    def _lacking(self) -> list[Path]:
        there = sorted((self.old / "runs").glob("[a-z0-9]*"))
        # A run's own container could have put a link in place of what labctl writes there.
        known = [
            run
            for run in there
            if NAME.fullmatch(run.name) and _is_directory(run) and _is_directory(run / ".labctl")
        ]
        return [run for run in known if not (self.here / "runs" / run.name).exists()]

    def _room(self, runs: list[Path]) -> None:
        size = sum(path.lstat().st_size for run in runs for path in walk(run))
        free = free_bytes(self.here)
        if size + RESERVE_BYTES > free:
            why = f"they take {size} bytes, {free} are free"
            raise Failure("disk", "the server's disk has no room for the results", why)

    def _run(self, run: Path, disk: str) -> None:
        runs = self.here / "runs"
        self._directory(runs)
        staging = runs / f"{STAGING}{run.name}"
        shutil.rmtree(staging, ignore_errors=True)
        self._tree(run, staging)
        about = {"disk": disk, "container": last_attempt(staging).get("container", "")}
        self._written(staging / ".labctl" / "restored.json", about)
        staging.rename(runs / run.name)

    def _tree(self, source: Path, target: Path) -> None:
        target.mkdir()
        for entry in os.scandir(source):
            place = target / entry.name
            if entry.is_symlink():
                place.symlink_to(os.readlink(entry.path))
                self._own(place)
            elif entry.is_dir():
                self._tree(Path(entry.path), place)
            elif entry.is_file():
                self._file(Path(entry.path), place)
        shutil.copystat(source, target)
        self._own(target)

    def _file(self, source: Path, place: Path) -> None:
        if place.is_symlink():
            place.unlink()
        try:
            shutil.copyfile(source, place, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            what = f"{source.name} cannot be read from the disk"
            raise Failure("disk", what, str(error), "labctl orphans") from None
        shutil.copystat(source, place)
        place.chmod(stat.S_IMODE(place.stat().st_mode) & 0o777)
        self._own(place)
        self.files += 1
        self.bytes += place.stat().st_size
        with suppress(FileNotFoundError):
            os.utime(home() / ".used")

    def _edits(self, disk: str) -> Iterator[str]:
        """Code that was edited there comes too, under another name where it was edited here."""
        old, new = self.old / "code", self.here / "code"
        pushed = read_json(self.old / ".labctl" / PUSHED)
        record = read_json(self.here / ".labctl" / PUSHED)
        for path in walk(old):
            name = str(path.relative_to(old))
            sha256 = _edited(path, pushed.get(name))
            if not sha256 or _ignored(name):
                continue
            place = inside(new, name)
            present = _hash(place)
            edited_here = present not in ("", sha256, record.get(name, [""])[0])
            if name in pushed:
                record.setdefault(name, pushed[name])
            if edited_here:
                place = place.with_name(f"{place.name}.from-{disk.rpartition('_')[2]}")
            if sha256 == _hash(place):
                continue
            self._directory(place.parent)
            self._file(path, place)
            yield str(place.relative_to(new))
        self._written(self.here / ".labctl" / PUSHED, record)
        saved = read_json(self.old / ".labctl" / SAVED)
        if saved:
            known = {**saved, **read_json(self.here / ".labctl" / SAVED)}
            self._written(self.here / ".labctl" / SAVED, known)

    def _written(self, path: Path, body: dict[str, Any]) -> None:
        self._directory(path.parent)
        write_json(path, body)
        self._own(path)

    def _directory(self, path: Path) -> None:
        """Made where it is missing, and the account's."""
        if not path.is_dir():
            self._directory(path.parent)
            path.mkdir()
            self._own(path)

    def _own(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid, follow_symlinks=False)


def _hash(path: Path) -> str:
    """Nothing there is ""; what is no plain file is somebody's work as well."""
    if path.is_file() and not path.is_symlink():
        return sha256_of(path)
    return "no file" if os.path.lexists(path) else ""


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _ignored(name: str) -> bool:
    return any(part in (BYTECODE, ".ipynb_checkpoints") for part in name.split("/"))


def _edited(path: Path, pushed: list[Any] | None) -> str:
    """The hash of a file that is not as a push brought it, "" for any other."""
    found = path.lstat()
    if pushed and pushed[1:] == [found.st_size, found.st_mtime_ns]:
        return ""
    sha256 = sha256_of(path)
    return "" if pushed and sha256 == pushed[0] else sha256

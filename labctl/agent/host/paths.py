"""Paths on a server, and the file operations that all verbs share."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from ...wire.codec import Message, MessageError, from_json
from ...wire.containment import find_link_on_way, is_contained
from ..reply import Failure

NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,38}$")
CHUNK = 1024 * 1024
# Below a run: [size, mtime_ns, sha256] of its files, with "" for a hash not computed yet.
HASHES = ".labctl/hashes.json"
# Beside a run that a limit ended: {"by": "ttl" or "budget", "at"}.
LIMIT = "limit.json"
# Files that exist during a shutdown: made by systemd and sysvinit, and by images/lab-server.
DOWN_MARKS = (Path("/run/nologin"), Path("/run/going-down"))


def labctl_home() -> Path:
    return Path.home() / "labctl"


def require_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise Failure("usage", f"bad name {name!r}", "a name matches ^[a-z0-9][a-z0-9-]{0,38}$")
    return name


def lab_dir(lab: str, lab_id: str) -> Path:
    """Return `~/labctl/<lab>`, or `~/labctl/<lab>-<id>` if another lab has the plain name."""
    plain = labctl_home() / require_name(lab)
    named = labctl_home() / f"{lab}-{lab_id[:6]}"
    if named.exists():
        return named
    owner = read_text(plain / ".labctl" / "id")
    if owner and owner != lab_id:
        plain = named
    if not owner or plain == named:
        (plain / ".labctl").mkdir(parents=True, exist_ok=True)
        write_text(plain / ".labctl" / "id", lab_id)
    return plain


def run_dir(root: Path, run_id: str) -> Path:
    return root / "runs" / require_name(run_id)


def resolve_inside(root: Path, relative: str) -> Path:
    """Return `root/relative`.

    Failure for a path that is absolute, leaves `root`, or passes through a link.
    """
    if not is_contained(relative):
        raise Failure("usage", f"the path {relative!r} leaves its directory")
    link = find_link_on_way(root, relative)
    if link is not None:
        what = f"{link} is a symbolic link"
        raise Failure("policy", what, "labctl does not follow links in a lab's directories")
    return root / relative


class CheckedPaths:
    """Paths below one directory as text: fast for thousands of them.

    Each is checked as by `resolve_inside`, but each parent directory only once.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._proved = {""}

    def __call__(self, relative: str) -> str:
        parent = relative.rpartition("/")[0]
        if parent not in self._proved or not is_contained(relative):
            resolve_inside(Path(self.root), relative)
            self._proved.add(parent)
        return f"{self.root}/{relative}"


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write by rename, so that a reader sees the old file or the new one."""
    staging = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
        staging.replace(path)
    except OSError:
        if staging.exists():
            staging.unlink()
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`; {} if the file does not exist or is damaged."""
    try:
        body = json.loads(read_text(path) or "{}")
    except (ValueError, UnicodeDecodeError):
        return {}
    return body if isinstance(body, dict) else {}


def read_record(kind: type[Message], path: Path) -> Message | None:
    """Return the record in `path`; None if the file is missing, damaged or another record."""
    body = read_json(path)
    try:
        return from_json(kind, body) if body else None
    except MessageError:
        return None


def read_json_number(path: Path, key: str) -> int | float | None:
    """Return a number of the object in `path`, such as "step" of a manifest; None without it."""
    value = read_json(path).get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def write_json(path: Path, body: Any, mode: int = 0o644) -> None:
    write_text(path, json.dumps(body, separators=(",", ":")), mode)


def hash_file(path: Path, length: int | None = None) -> str:
    """Return the hash of the first `length` bytes of a file, or of the whole file."""
    digest = hashlib.sha256()
    remaining = length
    with path.open("rb") as file:
        while remaining is None or remaining > 0:
            block = file.read(CHUNK if remaining is None else min(CHUNK, remaining))
            if not block:
                break
            digest.update(block)
            remaining = None if remaining is None else remaining - len(block)
    return digest.hexdigest()


def compute_age_s(moment_s: float) -> float:
    """Return the seconds since a recorded time of day, in Unix seconds.

    A time in the future was recorded before the clock was set back, so it is not recent either.
    """
    return abs(time.time() - moment_s)


def read_boottime_s() -> float:
    """Return the seconds since boot, including time asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_going_down() -> bool:
    """Return whether this machine is shutting down or restarting.

    systemd's state and the files that mark a shutdown tell.
    """
    import shutil  # needed only for a run that received a signal
    import subprocess

    if any(mark.exists() for mark in DOWN_MARKS):
        return True
    if not shutil.which("systemctl"):
        return False
    done = subprocess.run(
        ["systemctl", "is-system-running"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() == "stopping"


def count_free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return measure_disk(path)[0]


def measure_disk(path: Path) -> tuple[int, int]:
    """Return (bytes available to this user, total bytes) of the filesystem that holds `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def drop_tree(path: Path) -> None:
    """Remove a directory with its contents; an absent one is fine."""
    import shutil  # imported here to keep a successful `start` fast

    shutil.rmtree(path, ignore_errors=True)

"""The watchdog's files, on the server's own disk and never in a lab.

    limits.json      the limits (written by the verbs `guard` and `extend`)
    state.json       elapsed and idle time, and the warnings sent (written by the watchdog)
    status.json      the status that `watch` shows (written by the watchdog)
    decisions.jsonl  the last decisions with their reasons
    lock             locked while a watchdog lives; contains its process id
    bell             a socket: a datagram makes the watchdog read its limits at once

Root's directory is /var/lib/labctl/watchdog, a user's is a private one below /var/tmp, which
survives reboots and, unlike a home, is never on a network.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ...wire.codec import MessageError, decode, encode, from_json, to_json
from ...wire.watchdog import (
    DecisionRecord,
    LimitsRecord,
    WatchRecord,
    WatchReply,
    WatchRequest,
)
from ..host.paths import read_boottime_s, read_json, read_record, write_json, write_text
from ..reply import Failure

ROOT_DIR = Path("/var/lib/labctl/watchdog")
MOST_DECISIONS_BYTES = 256 * 1024
# seconds after which a watchdog that has written nothing counts as hung
FRESH_S = 60.0


def own_directory() -> Path:
    """Return the directory for a watchdog of this account."""
    return ROOT_DIR if os.geteuid() == 0 else Path(f"/var/tmp/labctl-watchdog-{os.getuid()}")


def find_directory(lab_id: str) -> Path | None:
    """Return the directory of this lab's watchdog, None without one."""
    for directory in (ROOT_DIR, Path(f"/var/tmp/labctl-watchdog-{os.getuid()}")):
        with suppress(PermissionError):
            if read_json(directory / "limits.json").get("lab_id") == lab_id and _is_trusted(
                directory
            ):
                return directory
    return None


def ensure_directory(directory: Path) -> Path:
    """Create the directory. Failure (policy) if it belongs to another user."""
    root = os.geteuid() == 0
    directory.mkdir(mode=0o755 if root else 0o700, parents=root, exist_ok=True)
    if not _is_trusted(directory):
        raise Failure("policy", f"{directory} belongs to another user", "", "labctl doctor")
    return directory


def _is_trusted(directory: Path) -> bool:
    return not directory.is_symlink() and directory.stat().st_uid in (0, os.getuid())


def read_limits(directory: Path) -> LimitsRecord | None:
    """Return the recorded limits, None without any. Failure if the file has another content."""
    path = directory / "limits.json"
    body = read_json(path)
    try:
        return from_json(LimitsRecord, body) if body else None
    except MessageError as error:
        what = f"the watchdog's limits in {path} are damaged"
        raise Failure("server", what, str(error), "labctl doctor") from None


def encode_limits(record: LimitsRecord) -> object:
    """Return the limits as limits.json has them.

    The first version refuses keys of limits that it does not know, so `stopped_s` is written only
    for a server that was stopped.
    """
    body = to_json(record)
    if not record.limits.stopped_s:
        del body["limits"]["stopped_s"]
    if not record.notices:
        del body["notices"]
    return body


def read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Lock:
    """The lock of a directory's only watchdog, held until its process ends in any way."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "lock"
        self.descriptor = -1

    def take(self) -> bool:
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.descriptor)
            return False
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)
        return True

    def holder(self) -> int:
        """Return the process id of the live watchdog, 0 without one."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return 0
        except BlockingIOError:
            return int(os.pread(descriptor, 20, 0) or b"0")
        finally:
            os.close(descriptor)


@contextmanager
def lock_limits(directory: Path) -> Iterator[None]:
    """Hold the lock for changes of limits.json."""
    with (directory / "limits.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def record_decision(directory: Path, elapsed_s: float, what: str, why: str) -> None:
    """Record a decision. A full disk does not stop the watchdog."""
    decision = DecisionRecord(round(time.time(), 1), round(elapsed_s, 1), what, why)
    path = directory / "decisions.jsonl"
    try:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(encode(decision) + "\n")
            if file.tell() > MOST_DECISIONS_BYTES:
                _shorten(path)
    except OSError as error:
        print(f"{what}: {why} (not recorded: {error})", file=sys.stderr, flush=True)


def _shorten(path: Path) -> None:
    rows = path.read_text().splitlines(keepends=True)
    write_text(path, "".join(rows[len(rows) // 2 :]))


def read_decisions(directory: Path, count: int) -> tuple[DecisionRecord, ...]:
    """Return the last decisions, the latest last."""
    path = directory / "decisions.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() and count else []
    entries = []
    for line in lines[-count:]:
        with suppress(MessageError):
            entries.append(decode(DecisionRecord, line))
    return tuple(entries)


def write_state(directory: Path, name: str, state: NamedTuple) -> None:
    """Write a record by rename. A full disk does not stop the watchdog."""
    with report_unwritten(name):
        write_json(directory / name, to_json(state))


@contextmanager
def report_unwritten(name: str) -> Iterator[None]:
    """Report on standard error that `name` could not be written: the disk may be full."""
    try:
        yield
    except OSError as error:
        print(f"{name} was not written: {error}", file=sys.stderr, flush=True)


def read_status(directory: Path, alive: bool, count: int) -> WatchRecord:
    """Return the last tick's status, carried to now, with the last `count` decisions."""
    decisions = read_decisions(directory, count)
    status = read_record(WatchRecord, directory / "status.json")
    if status is None:
        return WatchRecord(alive=False, decisions=decisions)
    since_s = read_boottime_s() - status.boottime_s if status.boot == read_boot_id() else FRESH_S
    return status._replace(
        ttl_left_s=_reduce(status.ttl_left_s, since_s),
        budget_left_s=_reduce(status.budget_left_s, since_s),
        elapsed_s=round(status.elapsed_s + since_s, 1),
        alive=alive and since_s < FRESH_S,
        decisions=decisions,
    )


def _reduce(left_s: float | None, since_s: float) -> float | None:
    return None if left_s is None else round(left_s - since_s, 1)


def watch(request: WatchRequest) -> WatchReply:
    """Return the state of the lab's watchdog (verb `watch`)."""
    directory = find_directory(request.lab_id)
    if directory is None:
        return WatchReply()
    alive = bool(Lock(directory).holder())
    return WatchReply(read_status(directory, alive, request.decisions))

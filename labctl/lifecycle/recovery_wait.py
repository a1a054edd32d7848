"""What a keeper's recovery does at the moment, and the request of `down` to end it.

<keep>/.locks/<lab>-<lab id>.doing   what the recovery does, and until when at most (`Activity`)
<keep>/.locks/<lab>-<lab id>.drop    a request to drop the lab, void after REQUEST_S

A recovery that only waits, for example for a server that does not answer, ends at such a request.
One that creates servers or starts a run completes that first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from labctl.config import Paths
from labctl.decoding import decode_json
from labctl.lifecycle.kept_labs import kept_lab_name
from labctl.model import Value
from labctl.servers.context import LabContext

REQUEST_S = 60.0


class Activity(Value, frozen=True):
    """What the recovery of process `pid` has been doing since Unix second `since`.

    `doing` continues "it has been". `until` is when that ends at the latest, 0 if nobody knows.
    """

    doing: str
    pid: int
    since: float
    until: float = 0.0

    def describe(self) -> str:
        limit = f", until {_clock_text(self.until)} at most" if self.until else ""
        return f"since {_clock_text(self.since)}, it has been {self.doing}{limit}"


@contextmanager
def report_activity(context: LabContext, doing: str, limit_s: float = 0.0) -> Iterator[None]:
    """Let `down` say what the recovery does meanwhile, and with `limit_s` for how long at most.

    Does nothing on a machine that is no keeper: its user sees what it does.
    """
    if not context.is_keeper:
        yield
        return
    now = time.time()
    until = now + limit_s if limit_s else 0.0
    activity = Activity(doing=doing, pid=os.getpid(), since=now, until=until)
    path = _path(context.paths, _name(context), "doing")
    before = read_activity(context.paths, _name(context))
    _write(path, activity)
    try:
        yield
    finally:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            _write(path, before)


def read_activity(paths: Paths, name: str) -> Activity | None:
    """Return what the recovery of a kept lab does; None without one."""
    try:
        activity = decode_json(_path(paths, name, "doing").read_bytes(), Activity)
        os.kill(activity.pid, 0)
    except (OSError, msgspec.MsgspecError):
        return None  # its process may have been killed
    return activity


@contextmanager
def request_drop(paths: Paths, name: str) -> Iterator[None]:
    """Have a recovery of the kept lab end meanwhile, as soon as it only waits."""
    path = _path(paths, name, "drop")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def is_drop_requested(context: LabContext) -> bool:
    """Whether somebody waits for this keeper to drop the lab."""
    if not context.is_keeper:
        return False
    with suppress(FileNotFoundError):
        requested_at = _path(context.paths, _name(context), "drop").stat().st_mtime
        return abs(time.time() - requested_at) < REQUEST_S
    return False


def _name(context: LabContext) -> str:
    return kept_lab_name(context.config.name, context.lab_id)


def _path(paths: Paths, name: str, suffix: str) -> Path:
    return paths.keep_dir / ".locks" / f"{name}.{suffix}"


def _write(path: Path, activity: Activity) -> None:
    draft = path.with_name(f"{path.name}.new")
    with suppress(OSError):  # a full disk must not end a recovery
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.write_bytes(msgspec.json.encode(activity))
        draft.replace(path)


def _clock_text(at: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(at))

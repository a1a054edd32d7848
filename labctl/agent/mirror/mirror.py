"""The mirror: a pass sends the new files of a lab's runs to its store.

Two passes of one lab never overlap; a stuck pass is killed. run_pass.py is what a pass does for one
run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable

from ...wire.codec import decode
from ...wire.mirrors import (
    MIRROR_NOW,
    MirrorPassReply,
    MirrorPassRequest,
)
from ...wire.verbs import ErrorMessage, ErrorReply, LabRequest
from ..files.edits import edits
from ..files.records import merge_hashes, read_hashes
from ..host.paths import compute_age_s, lab_dir
from ..reply import Failure, send_reply
from ..runs.executor import ProgramState
from ..runs.executors import inspect_unended
from ..runs.run_state import require_run_directory
from .run_pass import RunPass
from .store import (
    ChangedError,
    MirrorStore,
    StoreError,
    can_use_store,
    check_store,
    open_store,
    read_config,
    rerun_with_boto3,
)

LOCK = "mirror.lock"
STUCK_S = 60.0
POLL_S = 0.05


def mirror_now(request: MirrorPassRequest) -> MirrorPassReply:
    """Make one pass over a run, or over all runs of the lab."""
    root = lab_dir(request.lab, request.lab_id)
    if not can_use_store(read_config(root).url):
        return rerun_with_boto3(MIRROR_NOW, request)
    with _hold_lock(root / ".labctl" / LOCK) as progress:
        store = open_store(root, request.lab, request.lab_id, progress)
        try:
            return LabPass(root, request, store).execute()
        finally:
            store.close()


def serve(request: MirrorPassRequest) -> None:
    """Make a pass for this request, then for each line of standard input; reply to each.

    Python and boto3 are loaded only once, so that a small pass takes milliseconds.
    """
    lower_priority()
    while True:
        try:
            send_reply(mirror_now(request))
        except Failure as failure:
            send_reply(ErrorReply(failure.report))
        except OSError as error:
            send_reply(ErrorReply(ErrorMessage("disk", "the mirror failed", str(error))))
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = decode(MirrorPassRequest, line)


def lower_priority() -> None:
    """Give way to everything else that needs the processor."""
    with suppress(OSError):
        os.nice(19)


@contextmanager
def _hold_lock(path: Path) -> Iterator[Callable[[], None]]:
    """Allow one pass at a time; kill one that makes no progress.

    Yields a function to report progress.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _kill_stuck_holder(descriptor)
                time.sleep(POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        last = time.monotonic()

        def progress() -> None:
            nonlocal last
            if time.monotonic() - last > 1:
                last = time.monotonic()
                os.utime(descriptor)

        yield progress
    finally:
        os.close(descriptor)


def _kill_stuck_holder(descriptor: int) -> None:
    if compute_age_s(os.fstat(descriptor).st_mtime) > STUCK_S:
        holder = int(os.pread(descriptor, 20, 0) or b"0")
        with suppress(OSError):
            if holder > 1:
                os.kill(holder, signal.SIGKILL)


class LabPass:
    """One pass over the runs of a lab."""

    def __init__(self, root: Path, request: MirrorPassRequest, store: MirrorStore) -> None:
        self.root = root
        self.store = store
        self.lab = LabRequest(request.lab, request.lab_id)
        self.only = request.run
        self.everything = request.all
        self.url = read_config(root).url
        self.sent = self.bytes = self.behind = 0
        self.failed: list[tuple[str, str]] = []
        self.why = ""
        self.engine = True

    def execute(self) -> MirrorPassReply:
        started_s = time.monotonic()
        runs = sorted(
            (d for d in self.root.glob("runs/[a-z0-9]*") if d.is_dir()), key=_newest_first_key
        )
        if self.only:
            runs = [require_run_directory(*self.lab, self.only)]
        if not runs:  # else the passes show whether the store can be used
            self._try("the store", lambda: check_store(self.store))
        programs = self._inspect_live(runs)
        for directory in runs:
            self._try(directory.name, RunPass(self, directory, programs).mirror)
        if self.everything and not self.only:
            self._try("the edited code", self._send_edits)
        duration_s = max(time.monotonic() - started_s, 0.001)
        return MirrorPassReply(
            sent=self.sent,
            bytes=self.bytes,
            behind_bytes=self.behind,
            failed=tuple(self.failed[:50]),
            why=self.why,
            bytes_s=self.bytes / duration_s if self.bytes else 0.0,
        )

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except StoreError as error:
            self.record_failure(name, error)
        except Failure as failure:
            self.failed.append((name, failure.report.what))
        except OSError as error:
            self.failed.append((name, str(error)))

    def record_failure(self, name: str, error: StoreError) -> None:
        self.failed.append((name, str(error)))
        if error.whole:
            self.why = str(error)

    def _inspect_live(self, runs: list[Path]) -> dict[str, ProgramState]:
        try:
            return inspect_unended(runs)
        except Failure:
            self.engine = False  # send results even without the engine
            return {}

    def send(self, name: str, path: Path, size: int, sha256: str) -> bool:
        """Return whether the file is in the store now.

        Nothing is tried once the store cannot be used.
        """
        if self.why:
            self.behind += size
            return False
        try:
            self.store.send(name, path, size, sha256)
        except FileNotFoundError:
            return False  # removed meanwhile: nothing left to send
        except ChangedError:
            self.behind += size
            return False
        except StoreError as error:
            self.record_failure(name, error)
            self.behind += size
            return False
        self.sent += 1
        self.bytes += size
        return True

    def _send_edits(self) -> None:
        record_path = self.root / ".labctl" / "saved-edits.json"
        saved = read_hashes(record_path)
        for name, size, sha256, _ in edits(self.lab).files:
            if saved.get(name) != sha256 and self.send(
                f"server-edits/{name}", self.root / "code" / name, size, sha256
            ):
                merge_hashes(record_path, {name: sha256})


def _newest_first_key(directory: Path) -> float:
    """Return a sort key that puts the newest run first: it is the live one."""
    with suppress(OSError):
        return -(directory / ".labctl" / "claim.json").stat().st_mtime
    return 0.0


def build_priority_words() -> list[str]:
    """Return the words that start a low-priority pass, if the server has `ionice`."""
    return ["ionice", "-c", "3"] if shutil.which("ionice") else []

"""The record of a run whose server is being reclaimed: `.labctl/reclaim.json`.

The file is written before the signal, so that the run's end is not mistaken for its own.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

from ...wire.checkpoints import MANIFEST
from ...wire.watchdog import (
    CheckpointRecord,
    NoticeRecord,
    ReadReclaimReply,
    ReadReclaimRequest,
    RunReclaimRecord,
)
from ..host.paths import lab_dir, read_json, read_json_number, read_record, run_dir
from ..runs.executor import LiveAttempt
from ..runs.executors import get_executor
from .state_files import write_state

Say = Callable[[str, str], None]
NAME = "reclaim.json"


def find_newest_complete(directory: Path) -> CheckpointRecord | None:
    """Return the run's newest complete checkpoint, by the times of manifests; None without one.

    Complete means that all files have their full size; hashes are compared when it is sent.
    """
    newest: CheckpointRecord | None = None
    for folder, _, names in os.walk(directory / "checkpoints"):
        if MANIFEST not in names or Path(folder).name.startswith("."):
            continue
        with suppress(OSError):
            at = (Path(folder) / MANIFEST).stat().st_mtime
            if (newest is None or at > newest.at) and _is_complete(Path(folder)):
                step = read_json_number(Path(folder) / MANIFEST, "step")
                newest = CheckpointRecord(os.path.relpath(folder, directory), step, at)
    return newest


def _is_complete(folder: Path) -> bool:
    files = read_json(folder / MANIFEST).get("files", {})
    return isinstance(files, dict) and all(
        (folder / name).stat().st_size == expected.get("size")
        for name, expected in files.items()
        if isinstance(expected, dict) and "size" in expected
    )


def read_reclaim(request: ReadReclaimRequest) -> ReadReclaimReply:
    """Return the record of a run (verb `reclaimed`)."""
    directory = run_dir(lab_dir(request.lab, request.lab_id), request.run)
    return ReadReclaimReply(read_record(RunReclaimRecord, directory / ".labctl" / NAME))


class ReclaimedRun:
    """A run whose server is being reclaimed."""

    def __init__(self, attempt: LiveAttempt, notice: NoticeRecord, say: Say) -> None:
        self.attempt = attempt
        self.run = attempt.run
        self.say = say
        self.directory = attempt.directory
        self._meta = self.directory / ".labctl"
        earlier = read_record(RunReclaimRecord, self._meta / NAME)
        if earlier and earlier.container == attempt.name:  # an earlier watchdog started it
            self.record = earlier
        else:
            step = read_json_number(self.directory / "logs" / "progress.json", "step")
            self.record = RunReclaimRecord(attempt.name, notice, step=step)
        self.newest = find_newest_complete(self.directory)

    def send_sigterm(self) -> None:
        step = self.record.step
        self._update(sigterm_at=self.record.sigterm_at or time.time())
        self.say("SIGTERM sent", self.run + ("" if step is None else f" at step {step}"))
        get_executor(self.attempt.executor).send_signal(self.attempt.name, signal.SIGTERM)

    def update(self, live_names: set[str]) -> None:
        """Record a new checkpoint, and the run's end once its attempt is not in `live_names`."""
        checkpoint = None if self.is_ended else find_newest_complete(self.directory)
        if (
            checkpoint
            and checkpoint != self.newest
            and checkpoint.at >= int(self.record.sigterm_at or 0.0)
        ):
            self.newest = checkpoint
            self._update(whole=checkpoint._replace(at=time.time()))
            self.say(
                "checkpoint complete",
                f"{self.run}: {checkpoint.checkpoint}, {self._time_since_sigterm()}",
            )
        if not self.is_ended and self.attempt.name not in live_names:
            self._update(ended_at=time.time())
            name = self.newest.checkpoint if self.newest else "none"
            self.say(
                "run stopped",
                f"{self.run}, {self._time_since_sigterm()}; its last checkpoint: {name}",
            )

    @property
    def is_ended(self) -> bool:
        return self.record.ended_at is not None

    @property
    def is_safe(self) -> bool:
        """Whether it has written a checkpoint since SIGTERM."""
        return self.record.whole is not None

    def is_done(self, store: bool) -> bool:
        """Return whether nothing is left to wait for."""
        return self.is_ended and (not store or self.record.mirrored_at is not None)

    def record_mirrored(self, left: list[str]) -> None:
        """Record the result of a mirror; `left` are the paths of files that it could not send."""
        if not any(path.startswith(f"{self.directory}/") for path in left):
            self._update(mirrored_at=time.time())

    def _time_since_sigterm(self) -> str:
        return f"{time.time() - (self.record.sigterm_at or 0.0):.1f} s after SIGTERM"

    def _update(self, **changes: Any) -> None:
        self.record = self.record._replace(**changes)
        write_state(self._meta, NAME, self.record)

"""The record of a run whose server is being reclaimed: `.labctl/reclaim.json`.

    container     the attempt's container
    notice        kind, action, source, heard_at, ends_at
    step          the last step before, from the run's progress.json; null without one
    sigterm_at    when it got SIGTERM
    whole         the checkpoint written after that: {"checkpoint", "step", "at"}; null for none
    ended_at      when its container had ended; null while it runs
    mirrored_at   when all its results were in the store; null until then

All times are Unix seconds. The file is written before the signal, so that the run's end is not
mistaken for its own.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

from ..host import engine
from ..host.engine_objects import ContainerRow
from ..host.paths import lab_dir, read_json, run_dir
from .state_files import write_state

Say = Callable[[str, str], None]
NAME = "reclaim.json"
MANIFEST = "manifest.json"


def find_newest_complete(directory: Path) -> dict[str, Any] | None:
    """Return the run's newest complete checkpoint: {"checkpoint", "step", "at"}, None without one.

    Complete means that all files have their full size; hashes are compared when it is sent. "at" is
    the time of its manifest.
    """
    newest: dict[str, Any] | None = None
    for folder, _, names in os.walk(directory / "checkpoints"):
        if MANIFEST not in names or Path(folder).name.startswith("."):
            continue
        with suppress(OSError):
            at = (Path(folder) / MANIFEST).stat().st_mtime
            if (newest is None or at > newest["at"]) and _is_complete(Path(folder)):
                step = read_json(Path(folder) / MANIFEST).get("step")
                name = os.path.relpath(folder, directory)
                newest = {"checkpoint": name, "step": step, "at": at}
    return newest


def _is_complete(folder: Path) -> bool:
    files = read_json(folder / MANIFEST).get("files", {})
    return isinstance(files, dict) and all(
        (folder / name).stat().st_size == expected.get("size")
        for name, expected in files.items()
        if isinstance(expected, dict) and "size" in expected
    )


def reclaimed(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"reclaim": the record, or {}} of the run "run" (verb `reclaimed`)."""
    directory = run_dir(lab_dir(request["lab"], request["lab_id"]), request["run"])
    return {"reclaim": read_json(directory / ".labctl" / NAME)}


class ReclaimedRun:
    """A run whose server is being reclaimed."""

    def __init__(self, container: ContainerRow, notice: dict[str, Any], say: Say) -> None:
        """Take `notice` as the file stores it."""
        self.id = container.Id
        self.run = container.labels["labctl.run"]
        self.say = say
        self.directory = Path(container.sources["/lab/run"])
        self._meta = self.directory / ".labctl"
        name = container.name
        self.body: dict[str, Any] = read_json(self._meta / NAME)
        if self.body.get("container") != name:  # otherwise, an earlier watchdog started it
            step = read_json(self.directory / "logs" / "progress.json").get("step")
            unset = dict.fromkeys(("sigterm_at", "whole", "ended_at", "mirrored_at"))
            self.body = {"version": 1, "container": name, "notice": notice, "step": step, **unset}
        self.newest = find_newest_complete(self.directory)

    def send_sigterm(self) -> None:
        step = self.body["step"]
        self._update(sigterm_at=self.body["sigterm_at"] or time.time())
        self.say("SIGTERM sent", self.run + ("" if step is None else f" at step {step}"))
        with suppress(engine.EngineRequestError):
            engine.call("POST", f"/containers/{self.id}/kill?signal=SIGTERM")

    def update(self, live_ids: set[str]) -> None:
        """Record a new checkpoint, and the run's end once its container is not in `live_ids`."""
        checkpoint = None if self.is_ended else find_newest_complete(self.directory)
        if (
            checkpoint
            and checkpoint != self.newest
            and checkpoint["at"] >= int(self.body["sigterm_at"])
        ):
            self.newest = checkpoint
            self._update(whole={**checkpoint, "at": time.time()})
            self.say(
                "checkpoint complete",
                f"{self.run}: {checkpoint['checkpoint']}, {self._time_since_sigterm()}",
            )
        if not self.is_ended and self.id not in live_ids:
            self._update(ended_at=time.time())
            name = (self.newest or {}).get("checkpoint", "none")
            self.say(
                "run stopped",
                f"{self.run}, {self._time_since_sigterm()}; its last checkpoint: {name}",
            )

    @property
    def is_ended(self) -> bool:
        return self.body["ended_at"] is not None

    @property
    def is_safe(self) -> bool:
        """Whether it has written a checkpoint since SIGTERM."""
        return self.body["whole"] is not None

    def is_done(self, store: bool) -> bool:
        """Return whether nothing is left to wait for."""
        return self.is_ended and (not store or self.body["mirrored_at"] is not None)

    def record_mirrored(self, left: list[str]) -> None:
        """Record the result of a mirror; `left` are the paths of files that it could not send."""
        if not any(path.startswith(f"{self.directory}/") for path in left):
            self._update(mirrored_at=time.time())

    def _time_since_sigterm(self) -> str:
        return f"{time.time() - self.body['sigterm_at']:.1f} s after SIGTERM"

    def _update(self, **what: Any) -> None:
        self.body.update(what)
        write_state(self._meta, NAME, self.body)

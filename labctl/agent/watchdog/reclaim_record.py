"""One run whose server is being taken back, and what became of it: `.labctl/reclaim.json`.

    container     which attempt this was
    notice        kind, action, source, heard_at, ends_at
    step          the last one before, as the run itself tells it; null where it does not
    sigterm_at    when it was asked to end
    whole         the checkpoint that it wrote then: {"checkpoint", "step", "at"}; null for none
    ended_at      when its container had ended; null while it runs
    mirrored_at   when all that it had was in the store; null until then

All times are Unix seconds. The file stands there before the run is asked, so that nobody takes its
end for its own doing.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

from ..host import engine
from ..host.paths import lab_dir, read_json, run_dir
from .state_files import keep

Say = Callable[[str, str], None]
NAME = "reclaim.json"
MANIFEST = "manifest.json"


def newest_whole(directory: Path) -> dict[str, Any] | None:
    """The run's newest checkpoint whose files are there in full size: {"checkpoint", "step", "at"}.

    "at" is its manifest's time. Hashes are compared where it is sent.
    """
    newest: dict[str, Any] | None = None
    for folder, _, names in os.walk(directory / "checkpoints"):
        if MANIFEST not in names or Path(folder).name.startswith("."):
            continue
        with suppress(OSError):
            at = (Path(folder) / MANIFEST).stat().st_mtime
            if (newest is None or at > newest["at"]) and _complete(Path(folder)):
                step = read_json(Path(folder) / MANIFEST).get("step")
                name = os.path.relpath(folder, directory)
                newest = {"checkpoint": name, "step": step, "at": at}
    return newest


def _complete(folder: Path) -> bool:
    listed = read_json(folder / MANIFEST).get("files", {})
    return isinstance(listed, dict) and all(
        (folder / name).stat().st_size == known.get("size")
        for name, known in listed.items()
        if isinstance(known, dict) and "size" in known
    )


def reclaimed(request: dict[str, Any]) -> dict[str, Any]:
    """The verb: {"reclaim": the file above, or {}} of the run "run"."""
    directory = run_dir(lab_dir(request["lab"], request["lab_id"]), request["run"])
    return {"reclaim": read_json(directory / ".labctl" / NAME)}


class Taken:
    def __init__(self, container: dict[str, Any], notice: dict[str, Any], say: Say) -> None:
        """`container` as the engine lists it, `notice` as it stands in the file."""
        self.id = container["Id"]
        self.run = container["Labels"]["labctl.run"]
        self.say = say
        mounts = {one["Destination"]: one.get("Source", "") for one in container["Mounts"]}
        self.directory = Path(mounts["/lab/run"])
        self.own = self.directory / ".labctl"
        name = container["Names"][0].lstrip("/")
        self.body: dict[str, Any] = read_json(self.own / NAME)
        if self.body.get("container") != name:  # else a watchdog that was killed had begun it
            step = read_json(self.directory / "logs" / "progress.json").get("step")
            never = dict.fromkeys(("sigterm_at", "whole", "ended_at", "mirrored_at"))
            self.body = {"version": 1, "container": name, "notice": notice, "step": step, **never}
        self.newest = newest_whole(self.directory)

    def ask_to_end(self) -> None:
        step = self.body["step"]
        self._note(sigterm_at=self.body["sigterm_at"] or time.time())
        self.say("run asked to end", self.run + ("" if step is None else f" at step {step}"))
        with suppress(engine.Refused):
            engine.ask("POST", f"/containers/{self.id}/kill?signal=SIGTERM")

    def look(self, alive: set[str]) -> None:
        """See whether it has written its checkpoint, and whether it has ended."""
        found = None if self.ended else newest_whole(self.directory)
        if found and found != self.newest and found["at"] >= int(self.body["sigterm_at"]):
            self.newest = found
            self._note(whole={**found, "at": time.time()})
            self.say("checkpoint whole", f"{self.run}: {found['checkpoint']}, {self._after()}")
        if not self.ended and self.id not in alive:
            self._note(ended_at=time.time())
            last = (self.newest or {}).get("checkpoint", "none")
            self.say("run stopped", f"{self.run}, {self._after()}; its last checkpoint: {last}")

    @property
    def ended(self) -> bool:
        return self.body["ended_at"] is not None

    @property
    def safe(self) -> bool:
        """It has written a checkpoint since it was asked to."""
        return self.body["whole"] is not None

    def done(self, store: bool) -> bool:
        """Nothing more will come of it."""
        return self.ended and (not store or self.body["mirrored_at"] is not None)

    def mirrored(self, left: list[str]) -> None:
        """A mirror has run; `left` are paths of files that it could not send."""
        if not any(path.startswith(f"{self.directory}/") for path in left):
            self._note(mirrored_at=time.time())

    def _after(self) -> str:
        return f"{time.time() - self.body['sigterm_at']:.1f} s after SIGTERM"

    def _note(self, **what: Any) -> None:
        self.body.update(what)
        keep(self.own, NAME, self.body)

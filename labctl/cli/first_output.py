"""A line on the terminal between a run's start and its first output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from labctl.cli.screen import Screen
from labctl.errors import LabError
from labctl.events import Progress, Step
from labctl.text import bytes_text

if TYPE_CHECKING:
    from labctl.insight.top import ServerMetrics

WAITING = "waiting for first output"
# seconds between two measurements: each keeps a core of the server busy for a moment
EVERY_S = 3.0


class FirstOutputLine:
    """Shows what a run does before its first output. Without a terminal it shows nothing.

    `describe` measures and describes it; it is called in a thread of its own.
    """

    def __init__(self, screen: Screen, describe: Callable[[str], str]) -> None:
        self._screen = screen
        self._describe = describe
        self._lock = Lock()
        self._over = Event()

    def start(self, run_id: str) -> None:
        if sys.stderr.isatty():
            self._screen.emit(Step(name=WAITING, brief=True))
            Thread(target=self._measure, args=(run_id,), daemon=True).start()

    def _measure(self, run_id: str) -> None:
        while not self._over.wait(EVERY_S):
            try:
                detail = self._describe(run_id)
            except LabError:
                return  # the line says less then; following the log reports a lost server
            with self._lock:
                if not self._over.is_set():
                    event = Progress(name=WAITING, done=0, total=0, unit="steps", detail=detail)
                    self._screen.emit(event)

    def stop(self) -> None:
        """Remove the line, for good."""
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                self._screen.emit(Step(name=WAITING, done=True, brief=True))

    def watch_log(self, on_log: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return a function that removes the line before it calls `on_log`."""

        def pass_on(block: bytes) -> None:
            if block:
                self.stop()
            on_log(block)

        return pass_on


def describe_activity(now: ServerMetrics, lab_id: str, run_id: str) -> str:
    """Write what a run uses: `0.9 cores busy, 120 MiB memory, GPU 35% busy`."""
    runs = [run for run in now.runs if (run.lab_id, run.run) == (lab_id, run_id)]
    if not runs:
        return "its container is starting"
    run = runs[0]
    parts = [] if run.cpu_cores is None else [f"{run.cpu_cores:.1f} cores busy"]
    parts += [] if run.memory_bytes is None else [f"{bytes_text(run.memory_bytes)} memory"]
    use = [gpu.use_percent for gpu in now.gpus if gpu.uuid in run.gpus]
    known = [percent for percent in use if percent is not None]
    parts += [f"GPU {sum(known) / len(known):.0f}% busy"] if known else []
    return ", ".join(parts)

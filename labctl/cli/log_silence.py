"""A line on the terminal while a followed run prints nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from labctl.cli.screen import Screen
from labctl.errors import LabError
from labctl.events import Progress, Step
from labctl.text import bytes_text

if TYPE_CHECKING:
    from labctl.insight.top import ServerMetrics

FIRST, NEXT = "waiting for first output", "waiting for output"
CONTAINER_STARTING = "its container is starting"
# seconds of silence until the line is shown or measured again, and from when on less often: each
# measurement keeps a core of the server busy for a moment
EVERY_S = 3.0
LONG_S, LONG_EVERY_S = 30.0, 15.0
POLL_S = 0.5


class LogSilenceLine:
    """Shows what a run does while it prints nothing. Without a terminal it shows nothing.

    `describe` measures and describes it; it is called in a thread of its own. The line shows
    `detail` until then. `is_line_open` says whether the output has stopped within a line.
    """

    def __init__(
        self, screen: Screen, describe: Callable[[str], str], detail: str = CONTAINER_STARTING
    ) -> None:
        self._screen = screen
        self._describe = describe
        self._lock = Lock()
        self._over = Event()
        self._name, self._detail = FIRST, detail
        self._heard_s = 0.0
        self.is_line_open = False

    def start(self, run_id: str) -> None:
        if sys.stderr.isatty():
            self._heard_s = time.monotonic()
            self._screen.emit(Step(name=self._name, brief=True))
            Thread(target=self._measure, args=(run_id,), daemon=True).start()

    def _measure(self, run_id: str) -> None:
        measured_s = -LONG_EVERY_S
        while not self._over.wait(POLL_S):
            pause_s = LONG_EVERY_S if self._silence_s() > LONG_S else EVERY_S
            if not self._is_silent() or time.monotonic() - measured_s < pause_s:
                continue
            measured_s = time.monotonic()
            self._draw()
            try:
                detail = self._describe(run_id)
            except LabError:
                return  # the line says less then; following the log reports a lost server
            self._draw(detail)

    def _draw(self, detail: str = "") -> None:
        """Draw the line, with the last detail for none, unless output has come meanwhile."""
        with self._lock:
            if not self._is_silent() or self._over.is_set():
                return
            self._detail = detail or self._detail
            self._screen.emit(
                Progress(
                    name=self._name,
                    done=0,
                    total=0,
                    unit="steps",
                    detail=self._detail,
                    elapsed_s=self._silence_s(),
                )
            )

    def _silence_s(self) -> float:
        return time.monotonic() - self._heard_s

    def _is_silent(self) -> bool:
        """Whether the line may be drawn: not below half a line, such as a progress bar."""
        return not self.is_line_open and self._silence_s() >= EVERY_S

    def stop(self) -> None:
        """Remove the line, for good."""
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                self._remove()

    def _remove(self) -> None:
        self._screen.emit(Step(name=self._name, done=True, brief=True))

    def watch_log(self, on_log: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return a function that removes the line before it calls `on_log`."""

        def pass_on(block: bytes) -> None:
            with self._lock:  # the line is not drawn again before the block is printed
                if block:
                    self._remove()
                    self._name, self._detail = NEXT, ""
                    self.is_line_open = not block.endswith(b"\n")
                on_log(block)
                self._heard_s = time.monotonic() if block else self._heard_s

        return pass_on


def describe_activity(now: ServerMetrics, lab_id: str, run_id: str) -> str:
    """Write what a run uses: `0.9 cores busy, 120 MiB memory, GPU 35% busy`; "" if it has ended."""
    runs = [run for run in now.runs if (run.lab_id, run.run) == (lab_id, run_id)]
    if not runs:
        return ""
    run = runs[0]
    parts = [] if run.cpu_cores is None else [f"{run.cpu_cores:.1f} cores busy"]
    parts += [] if run.memory_bytes is None else [f"{bytes_text(run.memory_bytes)} memory"]
    use = [gpu.use_percent for gpu in now.gpus if gpu.uuid in run.gpus]
    known = [percent for percent in use if percent is not None]
    parts += [f"GPU {sum(known) / len(known):.0f}% busy"] if known else []
    return ", ".join(parts)

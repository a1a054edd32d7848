"""A line on the terminal between a run's start and its first output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Lock, Timer

from labctl.cli.screen import Screen
from labctl.events import Step

# seconds until it appears: drawing costs a short command more than it says
DELAY_S = 1.0
# short, because an 80-column terminal has 27 columns for it beside the bar
WAITING = "waiting for first output"


class FirstOutputLine:
    """Shows how long the run has been without output. Without a terminal it shows nothing."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._lock = Lock()
        self._timer: Timer | None = None
        self._is_over = False

    def start(self) -> None:
        if sys.stderr.isatty():
            self._timer = Timer(DELAY_S, self._draw)
            self._timer.daemon = True
            self._timer.start()

    def _draw(self) -> None:
        with self._lock:
            if not self._is_over:
                self._screen.emit(Step(name=WAITING))

    def stop(self) -> None:
        """Remove the line, for good."""
        with self._lock:
            if self._is_over or self._timer is None:
                return
            self._is_over = True
            self._timer.cancel()
            self._screen.stop_drawing()

    def watch_log(self, on_log: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return a function that removes the line before it calls `on_log`."""

        def pass_on(block: bytes) -> None:
            if block:
                self.stop()
            on_log(block)

        return pass_on

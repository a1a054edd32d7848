"""Live progress of an operation on a class: the state of each seat.

On a terminal it is one table that is redrawn; else one line for each seat that is done.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from labctl.cli.exit_codes import clean
from labctl.cli.screen import Screen
from labctl.cli.wrapping import print_message
from labctl.courses.seat_reporter import SeatDone, SeatEvent, SeatNews
from labctl.events import Event, Note, Question
from labctl.lazy import lazy_imports
from labctl.text import duration_text

with lazy_imports(__name__):
    from rich import console as rich_console
    from rich import live as rich_live
    from rich import table as rich_table
    from rich import text as rich_text

# rows of the terminal that the table leaves free
ROWS_KEPT_FREE = 6
ORDER = {"failed": 0, "running": 1, "waiting": 2, "done": 3}
STYLES = {"failed": "red", "running": "cyan", "waiting": "dim", "done": "green"}


@dataclass
class _SeatRow:
    state: str = "waiting"
    text: str = ""
    since: float = 0.0


class ClassScreen:
    """A Reporter that draws the events of seats, and passes all others to the screen.

    It is a context manager. At its end the live table is removed, and each warning is printed once
    with the number of seats that it concerns. It may be used from many threads.
    """

    def __init__(self, screen: Screen, seats: Iterable[str], done: str = "ready") -> None:
        self._screen = screen
        self._done = done
        self._rows = {seat: _SeatRow() for seat in seats}
        self._lock = threading.RLock()
        # A second lock: stopping the live table waits for its thread, which reads the rows.
        self._rows_lock = threading.Lock()
        self._live: Any = None
        self._warnings: dict[str, list[str]] = {}
        self._begun = 0.0

    def __enter__(self) -> ClassScreen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_drawing()
        self._screen.stop_drawing()
        for text, seats in self._warnings.items():
            whose = seats[0] if len(seats) == 1 else f"{len(seats)} seats"
            print_message(clean(f"{whose}: {text}"), fg="yellow")

    def emit(self, event: Event) -> None:
        with self._lock:
            if not isinstance(event, SeatEvent):
                self._emit_to_screen(event)
                return
            self._record(event)
            if self._screen.quiet:
                return
            if sys.stderr.isatty():
                self._update_table()
            elif isinstance(event, SeatDone):
                self._print_done(event)

    def _emit_to_screen(self, event: Event) -> None:
        """Draw an event without a seat; the table is removed first, lest they overwrite it."""
        was_live = self._live is not None
        self.stop_drawing()
        self._screen.emit(event)
        if was_live and isinstance(event, Note):
            self._update_table()

    def confirm(self, decision: Question) -> bool:
        with self._lock:
            self.stop_drawing()
            return self._screen.confirm(decision)

    def stop_drawing(self) -> None:
        """Remove the live table from the screen."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _record(self, event: SeatEvent) -> None:
        with self._rows_lock:
            row = self._rows.setdefault(event.seat, _SeatRow())
            row.since = row.since or time.monotonic()
            # The time starts with the first event, after the question about the price.
            self._begun = self._begun or row.since
            if isinstance(event, SeatDone):
                row.state, row.text = ("failed", event.error) if event.error else ("done", "")
            elif isinstance(event, SeatNews) and event.warning:
                self._warnings.setdefault(event.text, []).append(event.seat)
            elif isinstance(event, SeatNews):
                row.state, row.text = "running", event.text

    def _print_done(self, event: SeatDone) -> None:
        elapsed = duration_text(time.monotonic() - self._rows[event.seat].since)
        text = f"failed: {event.error}" if event.error else f"{self._done} {elapsed}"
        print_message(f"  {clean(event.seat)}: {clean(text)}")

    def _update_table(self) -> None:
        if self._live is None:
            self._screen.stop_drawing()
            self._live = rich_live.Live(
                console=rich_console.Console(stderr=True),
                get_renderable=self._make_table,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()

    def _make_table(self) -> Any:
        with self._rows_lock:
            columns, lines = shutil.get_terminal_size((100, 24))
            table = rich_table.Table(
                box=None, show_header=False, padding=(0, 2, 0, 0), width=columns - 1
            )
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
            rows = sorted(self._rows.items(), key=lambda item: ORDER[item[1].state])
            max_rows = max(3, lines - ROWS_KEPT_FREE)
            for seat, row in rows[:max_rows]:
                state = self._done if row.state == "done" else row.state
                table.add_row(
                    clean(seat),
                    rich_text.Text(state, style=STYLES[row.state]),
                    rich_text.Text(clean(row.text)),
                )
            if len(rows) > max_rows:
                table.add_row(f"and {len(rows) - max_rows} more", "", "")
            return rich_console.Group(table, rich_text.Text(), rich_text.Text(self._summary_text()))

    def _summary_text(self) -> str:
        counts = dict.fromkeys(ORDER, 0)
        for row in self._rows.values():
            counts[row.state] += 1
        parts = [f"{counts['done']} of {len(self._rows)} {self._done}"]
        parts += [f"{counts[state]} {state}" for state in ("running", "failed") if counts[state]]
        return f"{', '.join(parts)}; {duration_text(time.monotonic() - self._begun)}"

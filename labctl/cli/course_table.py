"""A class at work, live: how many are through, who is at what, who failed.

On a terminal one table that is redrawn; else one line for each seat that is through.
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

import click

from labctl.cli.exit_codes import clean
from labctl.cli.screen import Screen, span
from labctl.courses.seat_reporter import Done, News, SeatEvent
from labctl.events import Decision, Event, Note

ROWS_KEPT_FREE = 6
ORDER = {"failed": 0, "going": 1, "waiting": 2, "done": 3}
STYLES = {"failed": "red", "going": "cyan", "waiting": "dim", "done": "green"}


@dataclass
class _Row:
    state: str = "waiting"
    text: str = ""
    since: float = 0.0


class ClassScreen:
    """A Reporter: draws what is told of seats, and hands all else to the screen.

    Used as a context: at its end what is live is taken off the screen, and warnings are told, each
    once with how many it concerns. Safe from many threads.
    """

    def __init__(self, screen: Screen, seats: Iterable[str], done: str = "ready") -> None:
        self._screen = screen
        self._done = done
        self._rows = {seat: _Row() for seat in seats}
        self._lock = threading.RLock()
        # Apart from the other: whoever stops the live table waits for its thread, which reads rows.
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
        self.rest()
        self._screen.rest()
        for text, seats in self._warnings.items():
            whose = seats[0] if len(seats) == 1 else f"{len(seats)} seats"
            click.echo(click.style(clean(f"{whose}: {text}"), fg="yellow"), err=True)

    def emit(self, event: Event) -> None:
        with self._lock:
            if not isinstance(event, SeatEvent):
                self._beside(event)
                return
            self._take(event)
            if self._screen.quiet:
                return
            if sys.stderr.isatty():
                self._draw()
            elif isinstance(event, Done):
                self._line(event)

    def _beside(self, event: Event) -> None:
        """What is of no seat, in the table's place: two drawings would write over each other."""
        was_live = self._live is not None
        self.rest()
        self._screen.emit(event)
        if was_live and isinstance(event, Note):
            self._draw()

    def ask(self, decision: Decision) -> bool:
        with self._lock:
            self.rest()
            return self._screen.ask(decision)

    def rest(self) -> None:
        """Take the live table off the screen."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _take(self, event: SeatEvent) -> None:
        with self._rows_lock:
            row = self._rows.setdefault(event.seat, _Row())
            row.since = row.since or time.monotonic()
            # The clock does not run while somebody is thinking about the price.
            self._begun = self._begun or row.since
            if isinstance(event, Done):
                row.state, row.text = ("failed", event.error) if event.error else ("done", "")
            elif isinstance(event, News) and event.warning:
                self._warnings.setdefault(event.text, []).append(event.seat)
            elif isinstance(event, News):
                row.state, row.text = "going", event.text

    def _line(self, event: Done) -> None:
        took = span(time.monotonic() - self._rows[event.seat].since)
        said = f"failed: {event.error}" if event.error else f"{self._done} {took}"
        click.echo(f"  {clean(event.seat)}: {clean(said)}", err=True)

    def _draw(self) -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._screen.rest()
            self._live = Live(
                console=Console(stderr=True),
                get_renderable=self._table,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()

    def _table(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        with self._rows_lock:
            columns, lines = shutil.get_terminal_size((100, 24))
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), width=columns - 1)
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
            shown = sorted(self._rows.items(), key=lambda one: ORDER[one[1].state])
            room = max(3, lines - ROWS_KEPT_FREE)
            for seat, row in shown[:room]:
                state = self._done if row.state == "done" else row.state
                table.add_row(
                    clean(seat), Text(state, style=STYLES[row.state]), Text(clean(row.text))
                )
            if len(shown) > room:
                table.add_row(f"and {len(shown) - room} more", "", "")
            return Group(table, Text(), Text(self._summary()))

    def _summary(self) -> str:
        counts = dict.fromkeys(ORDER, 0)
        for row in self._rows.values():
            counts[row.state] += 1
        told = [f"{counts['done']} of {len(self._rows)} {self._done}"]
        told += [f"{counts[state]} {state}" for state in ("going", "failed") if counts[state]]
        return f"{', '.join(told)}; {span(time.monotonic() - self._begun)}"

"""`--timings`: when each part on the way to a run's first line began, and how long it took."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from labctl.events import AskPassword, Event, Part, Question, Reporter, find_password_prompt
from labctl.model import Value
from labctl.shell import Secret

FIRST_LINE = "first line"
# Columns for the name, the start and the duration of a part.
_FIGURES_WIDTH = 32
_WIDEST_BAR = 80


class TimedPart(Value, frozen=True):
    """A part, in seconds since the command began. An interrupted part has two entries."""

    name: str
    start_s: float
    duration_s: float


class Timings(Value, frozen=True):
    """The parts in the order of their starts. They overlap if labctl does several at once.

    `total_s` is the time to the end of the last one. `ratio` is `total_s` divided by the duration
    of the longest part: at 1, all other parts ran at the same time as that one.
    """

    parts: tuple[TimedPart, ...]
    total_s: float
    longest: str
    ratio: float


class Timeline:
    """A Reporter that measures parts, and passes every event on.

    The time that a question waits for its answer does not count.
    """

    def __init__(self, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._clock = clock
        self._zero = clock()
        self._begun: dict[str, float] = {}
        self._parts: list[TimedPart] = []
        self._is_printed = False

    def emit(self, event: Event) -> None:
        if isinstance(event, Part) and event.done:
            self._end(event.name)
        elif isinstance(event, Part):
            self._begun[event.name] = self._elapsed_s()
        self._reporter.emit(event)

    def confirm(self, decision: Question) -> bool:
        with self._pause():
            return self._reporter.confirm(decision)

    def find_password_prompt(self) -> AskPassword | None:
        ask = find_password_prompt(self._reporter)
        if ask is None:
            return None

        def ask_paused(prompt: str) -> Secret:
            with self._pause():
                return ask(prompt)

        return ask_paused

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Stop the clock while the user answers."""
        asked_at = self._clock()
        try:
            yield
        finally:
            self._zero += self._clock() - asked_at

    def _elapsed_s(self) -> float:
        return self._clock() - self._zero

    def _end(self, name: str) -> None:
        start_s = self._begun.pop(name, None)
        if start_s is None:
            return
        self._parts.append(TimedPart(name, start_s, self._elapsed_s() - start_s))
        if name == "start":
            self._begun[FIRST_LINE] = self._elapsed_s()

    def summarize(self) -> Timings:
        """Return the parts that have ended."""
        parts = tuple(sorted(self._parts, key=lambda part: part.start_s))
        total_s = max((part.start_s + part.duration_s for part in parts), default=0.0)
        sums: dict[str, float] = {}
        for part in parts:
            sums[part.name] = sums.get(part.name, 0.0) + part.duration_s
        longest = max(sums, key=lambda name: sums[name], default="")
        ratio = total_s / sums[longest] if longest and sums[longest] else 1.0
        return Timings(parts, total_s, longest, ratio)

    def watch_log(
        self, on_log: Callable[[bytes], None], on_first: Callable[[], None]
    ) -> Callable[[bytes], None]:
        """Return a function that calls `on_log`, and at the first bytes also `on_first`.

        These bytes end the part FIRST_LINE. Only the first line that this command sees counts.
        """

        def pass_on(block: bytes) -> None:
            if block and FIRST_LINE in self._begun:
                self._end(FIRST_LINE)
                on_first()
            on_log(block)

        return pass_on

    def print_once(self) -> None:
        """Print the table on standard error, unless this was called before or no part has ended."""
        if self._parts and not self._is_printed:
            self._is_printed = True
            for line in describe_timings(self.summarize()):
                click.echo(line, err=True)


def describe_timings(timings: Timings, width: int = 0) -> list[str]:
    """Return the lines of the table: one for each part, with a bar, and the total."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    bar_width = max(10, min(width - _FIGURES_WIDTH, _WIDEST_BAR))
    lines = [click.style(f"{'part':<12}{'start':>8}{'took':>10}", dim=True)]
    for name in dict.fromkeys(part.name for part in timings.parts):
        spans = [part for part in timings.parts if part.name == name]
        took_s = sum(part.duration_s for part in spans)
        bar = _draw_bar(spans, timings.total_s, bar_width)
        lines.append(f"{name:<12}{spans[0].start_s:>6.1f} s{took_s:>8.1f} s  {bar}")
    if timings.longest:
        ratio = f"{timings.ratio:.2f} times the longest part ({timings.longest})"
        lines.append(f"{'total':<12}{'':>8}{timings.total_s:>8.1f} s  {ratio}")
    return lines


def _draw_bar(spans: list[TimedPart], total_s: float, width: int) -> str:
    """Draw each span with at least one character, at its place in the total."""
    cells = [" "] * width
    for span in spans:
        scale = width / total_s if total_s else 0.0
        first = min(round(span.start_s * scale), width - 1)
        end = max(first + 1, round((span.start_s + span.duration_s) * scale))
        cells[first:end] = "━" * (min(end, width) - first)
    return "".join(cells).rstrip()

"""Terminal output: a Reporter that draws steps and progress bars, and functions for tables.

Events go to standard error. Without a terminal there, each step is one line. Data goes to standard
output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from threading import RLock, Timer
from typing import TYPE_CHECKING, Any

import click
import msgspec

from labctl.cli.exit_codes import clean
from labctl.events import (
    AskPassword,
    BlockerNote,
    Event,
    Note,
    Progress,
    Question,
    RepeatedNote,
    Step,
    UniqueNote,
)
from labctl.lazy import lazy_imports
from labctl.shell import Secret
from labctl.text import bytes_text, duration_text

if TYPE_CHECKING:
    from msgspec import Struct

with lazy_imports(__name__):
    import json
    import textwrap

    from rich import console as rich_console
    from rich import progress as rich_progress

    from labctl.cli import keys, wrapping

# Columns of "999 MiB of 1023 MiB, 1023 KiB/s", and of the spinner, the time and the gaps.
_BYTES_WIDTH = 32
_TIME_WIDTH = 13
# seconds between two lines of a RepeatedNote without a terminal
REPEATED_S = 60.0
# seconds until a brief step is shown: drawing costs a short command more than it says, and a line
# without a terminal stays
WAIT_DELAY_S, PLAIN_WAIT_DELAY_S = 1.0, 10.0


class Bar(msgspec.Struct):
    """A bar on the screen: rich's task, and when it began in seconds of the monotonic clock."""

    task: Any
    started_at: float
    name: str
    detail: str = ""
    amount_width: int = 0

    def describe(self, width: int) -> str:
        """Return name and detail, or what fits of them: the end of the detail says the most."""
        text = f"{self.name}: {self.detail}" if self.detail else self.name
        shorter = (text, self.detail, self.detail.partition(", ")[2])
        return next((one for one in shorter if one and len(one) <= width), "") or _shorten(
            self.detail or self.name, width
        )


class Screen:
    """A Reporter that draws events on standard error and asks questions there.

    `bars` holds the bar of each progress, `begun` the start of each step in seconds of the
    monotonic clock, `waits` the timer of each brief step, `repeated` when each RepeatedNote and
    UniqueNote was last printed, `has_blocker` whether one was a BlockerNote. Bars end when done.
    """

    def __init__(self, *, yes: bool = False, quiet: bool = False) -> None:
        self.yes, self.quiet = yes, quiet
        self.live: Any = None
        self.bars: dict[str, Bar] = {}
        self.begun: dict[str, float] = {}
        self.waits: dict[str, Timer] = {}
        self.repeated: dict[str, float] = {}
        self.has_blocker = False
        # The timers of brief steps draw from their own threads.
        self._lock = RLock()

    def emit(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Note):
                self.has_blocker |= isinstance(event, BlockerNote)
                self._print_note(event)
            elif self.quiet:
                return
            elif isinstance(event, Step):
                (self._show_wait if event.brief else self._print_step)(event)
            elif isinstance(event, Progress):
                self._update_progress(event)

    def confirm(self, decision: Question) -> bool:
        """Ask a question. Without a terminal the answer is no, with a note on how to say yes."""
        if decision.typed:
            return self._ask_to_type(decision)
        if self.yes:
            if decision.about == "price" and decision.detail and not self.quiet:
                self._print(_fit(decision.detail))
            return True
        self.stop_drawing()
        keys.discard_typed_input()
        if decision.detail:
            click.echo(_fit(decision.detail), err=True)
        if not sys.stdin.isatty():
            text = f"{clean(decision.question)} no (not a terminal; use --yes to answer yes)"
            wrapping.print_message(text)
            return False
        # Wrapped with its choices, so that these are not broken at the edge.
        text = _fit(f"{decision.question} {'[Y/n]' if decision.default else '[y/N]'}:")
        return click.confirm(
            text, default=decision.default, show_default=False, prompt_suffix=" ", err=True
        )

    def _ask_to_type(self, decision: Question) -> bool:
        self.stop_drawing()
        keys.discard_typed_input()
        click.echo(_fit(decision.detail), err=True)
        if not sys.stdin.isatty():
            text = f"{clean(decision.question)}: no (not a terminal; --yes does not answer this)"
            wrapping.print_message(text)
            return False
        answer = click.prompt(
            clean(decision.question), default="", show_default=False, type=str, err=True
        )
        return str(answer).strip() == decision.typed

    def find_password_prompt(self) -> AskPassword | None:
        return self._ask_password if sys.stdin.isatty() else None

    def _ask_password(self, prompt: str) -> Secret:
        self.stop_drawing()
        return Secret(click.prompt(clean(prompt), hide_input=True, prompt_suffix="", err=True))

    def stop_drawing(self) -> None:
        """Remove live drawing from the screen before anything else writes there."""
        with self._lock:
            for timer in self.waits.values():
                timer.cancel()
            self.waits.clear()
            if self.live is not None:
                self.live.stop()
                self.live = None
                self.bars.clear()

    def print_data(self, text: str) -> None:
        """Print a line on standard output, above what is being drawn."""
        if self.live is not None:
            self.live.stop()
        click.echo(text)
        if self.live is not None:
            self.live.start()

    def _print_note(self, note: Note) -> None:
        if not self._should_print(note):
            return
        if note.level == "detail":
            if self.live is None and not self.quiet and not sys.stderr.isatty():
                click.echo(f"    {clean(note.text)}"[:200], err=True)
            return
        color = "yellow" if note.level == "warning" else None
        self._print(click.style(_fit(note.text), fg=color))

    def _should_print(self, note: Note) -> bool:
        """Say whether the note is due. On a terminal, draw a RepeatedNote instead."""
        if isinstance(note, UniqueNote):
            is_new = note.text not in self.repeated
            self.repeated[note.text] = time.monotonic()
            return is_new
        if not isinstance(note, RepeatedNote):
            return True
        if sys.stderr.isatty() and not self.quiet:
            self._draw_step(Step(name=note.name, detail=note.text))
            return False
        now_s = time.monotonic()
        if now_s - self.repeated.get(note.name, -REPEATED_S) < REPEATED_S:
            return False
        self.repeated[note.name] = now_s
        return True

    def _print(self, text: str) -> None:
        if self.live is not None:
            # Rich would break a long command into lines.
            self.live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            click.echo(text, err=True)

    def _print_step(self, step: Step) -> None:
        if not step.done:
            self.begun[step.name] = time.monotonic()
            if sys.stderr.isatty():
                self._draw_step(step)
            else:
                self._print(f"  {clean(step.name)}")
            return
        took_s = time.monotonic() - self.begun.pop(step.name, time.monotonic())
        self._remove_bar(step.name)
        detail = f" ({step.detail})" if step.detail else ""
        took = f"{took_s:.1f} s" if took_s < 120 else duration_text(took_s)
        # "creating a server: aws t3.micro" is no command.
        text = clean(f"{step.name}{detail} {took}")
        lines = wrapping.wrap_lines(text, 2, has_commands=False)
        self._print("\n  ".join([f"{click.style('✓', fg='green')} {lines[0]}", *lines[1:]]))

    def _draw_step(self, step: Step) -> None:
        detail = step.detail
        self._update_bar(Progress(name=step.name, done=0, total=0, unit="steps", detail=detail))

    def _show_wait(self, step: Step) -> None:
        """Show a brief step once it has lasted a moment, and remove it at its end."""
        if step.done:
            self.begun.pop(step.name, None)
            if timer := self.waits.pop(step.name, None):
                timer.cancel()
            self._remove_bar(step.name)
        else:
            delay_s = WAIT_DELAY_S if sys.stderr.isatty() else PLAIN_WAIT_DELAY_S
            timer = Timer(delay_s, self._draw_wait, [step])
            timer.daemon = True
            self.waits[step.name] = timer
            timer.start()

    def _draw_wait(self, step: Step) -> None:
        with self._lock:
            if step.name in self.waits and sys.stderr.isatty():
                # A wait within another step, such as a login, is part of what that one names.
                if not self.bars:
                    self._draw_step(step)
            elif step.name in self.waits:
                self._print(f"  {clean(step.name)}")

    def _update_progress(self, progress: Progress) -> None:
        if not sys.stderr.isatty():
            return
        self._update_bar(progress)
        is_over = progress.total and progress.done >= progress.total
        # A step ends its bar itself.
        if is_over and progress.name not in self.begun:
            self._remove_bar(progress.name)

    def _update_bar(self, progress: Progress) -> None:
        if self.live is None:
            self.live = _make_progress_bars()
            self.live.start()
        if progress.name not in self.bars:
            name = clean(progress.name)
            new_task = self.live.add_task(name, total=None, amount="")
            self.bars[progress.name] = Bar(new_task, time.monotonic(), name)
        bar = self.bars[progress.name]
        amount = _describe_amount(progress, time.monotonic() - bar.started_at)
        bar.detail = clean(progress.detail)
        bar.amount_width = _BYTES_WIDTH if progress.unit == "bytes" else len(amount)
        total = progress.total or None
        self.live.update(bar.task, completed=progress.done, total=total, amount=amount)
        self._fit_texts()

    def _fit_texts(self) -> None:
        """Shorten the texts of all bars to what the other columns leave."""
        width = self.live.console.width
        amounts = max(bar.amount_width for bar in self.bars.values())
        room = width - _choose_bar_width(width) - _TIME_WIDTH - amounts
        for bar in self.bars.values():
            self.live.update(bar.task, description=bar.describe(room))

    def _remove_bar(self, name: str) -> None:
        bar = self.bars.pop(name, None)
        if bar is not None and self.live is not None:
            self.live.remove_task(bar.task)
            if self.bars:
                self._fit_texts()
            else:
                self.live.stop()
                self.live = None


def _describe_amount(progress: Progress, elapsed_s: float) -> str:
    """Say how far it is, beside the bar; "" if the detail says it."""
    if progress.unit == "bytes":
        if not progress.done:
            return ""
        rate = progress.done / max(elapsed_s, 0.01)
        done, total = bytes_text(progress.done), bytes_text(progress.total)
        return f"{done} of {total}, {bytes_text(rate)}/s"
    if progress.total and not progress.detail:
        return f"{progress.done:.0f}/{progress.total:.0f}"
    return ""


def _make_progress_bars() -> Any:
    console = rich_console.Console(stderr=True)
    return rich_progress.Progress(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(bar_width=_choose_bar_width(console.width)),
        rich_progress.TextColumn("{task.fields[amount]}"),
        rich_progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _choose_bar_width(screen_width: int) -> int:
    return 20 if screen_width >= 100 else 8


# columns that are shortened, and characters that they and a table's last column keep
_NAMES = {"NAME", "TEST"}
_NAME_WIDTH = 12
_LAST_WIDTH = 24


def _shorten(text: str, width: int) -> str:
    width = max(width, 9)  # less would say nothing
    return text if len(text) <= width else f"{text[: width - 1]}…"


def age_text(moment: float | None, now: float | None = None) -> str:
    """Write the time since a Unix time; "-" for None and 0."""
    if not moment:
        return "-"
    return duration_text((now or time.time()) - moment)


def _fit(text: str, indent: int = 0) -> str:
    """Return a message without control characters, in lines that fit the terminal."""
    return "\n".join(wrapping.wrap_lines(clean(text), indent))


def wrap_text(text: str, indent: int = 0, width: int = 0) -> list[str]:
    """Wrap text into lines that fit the screen after the indent; words are never broken.

    A program that reads the text gets one line, whatever COLUMNS says. `width` is a terminal's.
    """
    if not width:
        width = wrapping.read_output_width() if sys.stdout.isatty() else wrapping.UNLIMITED
    room = max(width - indent, 20)
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)


def print_table(
    rows: Sequence[tuple[str, ...]],
    headings: tuple[str, ...],
    width: int = 0,
    *,
    cut: bool = True,
    optional: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Print a table, and return its headings without those left out.

    The last column ends at the screen's edge; with `cut=False` it is whole. On a terminal, a whole
    last column is folded at spaces, and names are shortened to make room for it; where that leaves
    too little room, it is below its row. The columns with the `optional` headings are left out, in
    this order, until the others fit. A program that reads the table gets all of it, whatever
    COLUMNS says. `width` is that of a terminal.
    """
    is_terminal = bool(width) or sys.stdout.isatty()
    width = width or wrapping.read_output_width()
    cells = [tuple(clean(c).replace("\n", " ") for c in row) for row in rows]
    if is_terminal:
        headings, cells = _leave_out(headings, cells, optional, width, cut=cut)
    widths = _measure_columns(headings, cells)
    if is_terminal:
        widths = _narrow_names(widths, headings, width)
    room = width - sum(w + 2 for w in widths[:-1])
    for index, row in enumerate([headings, *cells]):
        lines = [row[-1]]
        if cut and is_terminal:
            lines = [_shorten(row[-1], room)]
        elif is_terminal and len(row[-1]) > room:
            lines = _fold_last(row[-1], room, widths[0] + 2, width)
        columns = (_shorten(c, w).ljust(w) for c, w in zip(row[:-1], widths, strict=False))
        # Spaces at the end of a line would wrap in a narrow terminal.
        line = "  ".join([*columns, lines[0]]).rstrip()
        click.echo(click.style(line, dim=True) if index == 0 else line)
        for line in lines[1:]:
            click.echo(line)
    return headings


def _measure_columns(headings: tuple[str, ...], cells: list[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(headings, *cells, strict=True)]


def _leave_out(
    headings: tuple[str, ...],
    cells: list[tuple[str, ...]],
    optional: tuple[str, ...],
    width: int,
    *,
    cut: bool,
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the table without the optional columns that a terminal of `width` has no room for."""
    for name in optional:
        widths = _narrow_names(_measure_columns(headings, cells), headings, width)
        if not cut:  # a last column that is folded needs less
            widths = [*widths[:-1], min(widths[-1], _LAST_WIDTH)]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
        kept = [index for index, heading in enumerate(headings) if heading != name]
        cells = [tuple(row[index] for index in kept) for row in cells]
        headings = tuple(headings[index] for index in kept)
    return headings, cells


def _fold_last(text: str, room: int, indent: int, width: int) -> list[str]:
    """Fold the last column of a row: its part of the row, then the lines below it.

    A word that does not fit, such as a path, is on a line of its own, whatever its length.
    """
    longest = max(map(len, text.split()), default=0)
    indent = min(indent, max(0, width - max(longest, _LAST_WIDTH)))
    if room < max(_LAST_WIDTH, longest):
        return ["", *(" " * indent + line for line in wrap_text(text, indent, width))]
    first, *others = wrap_text(text, width - room, width)
    return [first, *(" " * (width - room) + line for line in others)]


def _narrow_names(widths: list[int], headings: tuple[str, ...], width: int) -> list[int]:
    """Return the widths with narrower columns of names, so that the last column has room."""
    excess = sum(w + 2 for w in widths[:-1]) + min(widths[-1], _LAST_WIDTH) - width
    narrowed = []
    for heading, column in zip(headings, widths, strict=True):
        most = max(_NAME_WIDTH, column - max(0, excess)) if heading in _NAMES else column
        narrowed.append(min(column, most))
        excess -= column - narrowed[-1]
    return narrowed


def print_json(report: Struct | Mapping[str, object]) -> None:
    """Print one JSON object with a version: the fields of a value, or values by their keys."""
    click.echo(json.dumps({"version": 1, **msgspec.to_builtins(report)}, indent=2))

"""Terminal output: a Reporter that draws steps and progress bars, and asks questions.

Events go to standard error. Without a terminal there, each step is one line. Data goes to standard
output.
"""

from __future__ import annotations

import sys
import time
from threading import RLock, Timer
from typing import Any

import click
import msgspec

from labctl.cli.exit_codes import clean
from labctl.cli.tables import shorten
from labctl.events import (
    AskPassword,
    BlockerNote,
    Event,
    Note,
    Part,
    Progress,
    Question,
    RepeatedNote,
    Step,
    UniqueNote,
)
from labctl.lazy import lazy_imports
from labctl.shell import Secret
from labctl.text import bytes_text, duration_text

with lazy_imports(__name__):
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
# the share of a bar that is drawn as done, at most
MAX_FILLED = 0.9999


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
        return next((one for one in shorter if one and len(one) <= width), "") or shorten(
            self.detail or self.name, width
        )


class Screen:
    """A Reporter that draws events on standard error and asks questions there.

    `bars` holds the bar of each progress, `begun` the start of each step in seconds of the
    monotonic clock, `waits` the timer of each brief step, `repeated` when each RepeatedNote and
    UniqueNote was last printed, `has_blocker` whether one was a BlockerNote, `awaits_start` whether
    a server was asked to start a run and has not answered. Bars end when done.
    """

    def __init__(self, *, yes: bool = False, quiet: bool = False) -> None:
        self.yes, self.quiet = yes, quiet
        self.live: Any = None
        self.bars: dict[str, Bar] = {}
        self.begun: dict[str, float] = {}
        self.waits: dict[str, Timer] = {}
        self.repeated: dict[str, float] = {}
        self.has_blocker = False
        self.awaits_start = False
        # when something was shown last, or this began
        self._shown_s = time.monotonic()
        # The timers of brief steps draw from their own threads.
        self._lock = RLock()

    def emit(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Note):
                self.has_blocker |= isinstance(event, BlockerNote)
                self._print_note(event)
            elif isinstance(event, Part):
                self.awaits_start = event.name == "start" and not event.done
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
        return _ask_yes_or_no(text, decision.default)

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
            self._shown_s = time.monotonic()
            for timer in self.waits.values():
                timer.cancel()
            self.waits.clear()
            if self.live is not None:
                self.live.stop()
                self.live = None
                self.bars.clear()

    def print_data(self, text: str) -> None:
        """Print a line on standard output, above what is being drawn."""
        self._shown_s = time.monotonic()
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
        self._shown_s = time.monotonic()
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
        began_s = self.begun.get(step.name, time.monotonic())
        self._update_bar(
            Progress(
                name=step.name,
                done=0,
                total=0,
                unit="steps",
                detail=step.detail,
                elapsed_s=time.monotonic() - began_s,
            )
        )

    def _show_wait(self, step: Step) -> None:
        """Show a brief step once it has lasted a moment, and remove it at its end."""
        if step.done:
            self.begun.pop(step.name, None)
            if timer := self.waits.pop(step.name, None):
                timer.cancel()
            self._remove_bar(step.name)
        else:
            self.begun[step.name] = time.monotonic()
            delay_s = PLAIN_WAIT_DELAY_S
            if sys.stderr.isatty():  # several short waits in a row are a long one
                delay_s = max(0.0, self._shown_s + WAIT_DELAY_S - time.monotonic())
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
        is_new = progress.name not in self.bars
        if is_new:
            if progress.name not in self.waits:  # what a step names says more than a wait around it
                for wait in self.waits:
                    self._remove_bar(wait)
            # Removing the last bar has ended the drawing.
            self.live = self.live or _start_progress_bars()
            name = clean(progress.name)
            new_task = self.live.add_task(name, total=None, amount="", visible=False)
            began_s = time.monotonic() - progress.elapsed_s
            self.live.tasks[-1].start_time = began_s  # rich's clock is the monotonic one
            self.bars[progress.name] = Bar(new_task, began_s, name)
        bar = self.bars[progress.name]
        amount = _describe_amount(progress, time.monotonic() - bar.started_at)
        bar.detail = clean(progress.detail)
        bar.amount_width = _BYTES_WIDTH if progress.unit == "bytes" else len(amount)
        total = progress.total or None
        # rich stops the clock and the spinner of a full bar, but the step may have more to do
        done = min(progress.done, total * MAX_FILLED) if total else progress.done
        self.live.update(bar.task, completed=done, total=total, amount=amount, visible=True)
        self._fit_texts()
        if is_new:
            self.live.refresh()  # it may be removed before rich would draw it

    def _fit_texts(self) -> None:
        """Shorten the texts of all bars to what the other columns leave."""
        width = self.live.console.width
        amounts = max(bar.amount_width for bar in self.bars.values())
        room = width - _choose_bar_width(width) - _TIME_WIDTH - amounts
        for bar in self.bars.values():
            self.live.update(bar.task, description=bar.describe(room))

    def _remove_bar(self, name: str) -> None:
        bar = self.bars.pop(name, None)
        if bar is not None:
            self._shown_s = time.monotonic()
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


def _start_progress_bars() -> Any:
    console = rich_console.Console(stderr=True)
    bars = rich_progress.Progress(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(bar_width=_choose_bar_width(console.width)),
        rich_progress.TextColumn("{task.fields[amount]}"),
        rich_progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    bars.start()
    return bars


def _choose_bar_width(screen_width: int) -> int:
    return 20 if screen_width >= 100 else 8


def _ask_yes_or_no(question: str, default: bool) -> bool:
    """Ask until the answer is y, n, or Enter for the default."""
    answers = {"y": True, "yes": True, "n": False, "no": False, "": default}
    while True:
        answer = click.prompt(question, default="", show_default=False, prompt_suffix=" ", err=True)
        if (decision := answers.get(answer.strip().lower())) is not None:
            return decision
        click.echo("please type y or n", err=True)


def _fit(text: str, indent: int = 0) -> str:
    """Return a message without control characters, in lines that fit the terminal."""
    return "\n".join(wrapping.wrap_lines(clean(text), indent))

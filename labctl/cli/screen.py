"""What people see: a Reporter that draws steps and bars on standard error, and tables.

Drawing needs a terminal; without one, each step is a line. Data goes to standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.exit_codes import clean
from labctl.events import Decision, Event, Note, Progress, Step

if TYPE_CHECKING:
    from labctl.model import Check

BAR_AFTER_S = 0.5


class Screen:
    """Draws events on standard error. One live line at the most, removed when it is done."""

    def __init__(self, *, yes: bool = False, quiet: bool = False) -> None:
        self.yes = yes
        self.quiet = quiet
        self.live: Any = None
        self.tasks: dict[str, tuple[Any, float]] = {}
        self.begun: dict[str, float] = {}

    def emit(self, event: Event) -> None:
        if isinstance(event, Note):
            self._note(event)
        elif self.quiet:
            return
        elif isinstance(event, Step):
            self._step(event)
        elif isinstance(event, Progress):
            self._progress(event)

    def ask(self, decision: Decision) -> bool:
        """A person's yes; without a terminal the answer is no, and that is said."""
        if decision.typed:
            return self._ask_to_type(decision)
        if self.yes:
            if decision.about == "price" and decision.detail and not self.quiet:
                self._line(clean(decision.detail))
            return True
        self.rest()
        if decision.detail:
            click.echo(clean(decision.detail), err=True)
        if not sys.stdin.isatty():
            text = f"labctl: {clean(decision.question)} no (not a terminal; --yes says yes)"
            click.echo(text, err=True)
            return False
        return click.confirm(clean(decision.question), default=decision.default, err=True)

    def _ask_to_type(self, decision: Decision) -> bool:
        self.rest()
        click.echo(clean(decision.detail), err=True)
        if not sys.stdin.isatty():
            text = f"labctl: {clean(decision.question)}: no (not a terminal; --yes does not help)"
            click.echo(text, err=True)
            return False
        answer = click.prompt(
            clean(decision.question), default="", show_default=False, type=str, err=True
        )
        return str(answer).strip() == decision.typed

    def rest(self) -> None:
        """Take live drawing off the screen, before anything else writes there."""
        if self.live is not None:
            self.live.stop()
            self.live = None
            self.tasks.clear()

    def _note(self, note: Note) -> None:
        if note.level == "detail":
            if self.live is None and not self.quiet and not sys.stderr.isatty():
                click.echo(f"    {clean(note.text)}"[:200], err=True)
            return
        color = "yellow" if note.level == "warning" else None
        self._line(click.style(clean(note.text), fg=color))

    def _line(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(text, highlight=False, markup=False)
        else:
            click.echo(text, err=True)

    def _step(self, step: Step) -> None:
        if not step.done:
            self.begun[step.name] = time.monotonic()
            if sys.stderr.isatty():
                self._task(step.name, 0.0, 0.0, "steps")
            else:
                self._line(f"  {clean(step.name)}")
            return
        took_s = time.monotonic() - self.begun.pop(step.name, time.monotonic())
        self._drop(step.name)
        detail = f" ({clean(step.detail)})" if step.detail else ""
        self._line(f"{click.style('✓', fg='green')} {clean(step.name)}{detail} {took_s:.1f} s")

    def _progress(self, progress: Progress) -> None:
        if not sys.stderr.isatty():
            return
        self._task(progress.name, progress.done, progress.total, progress.unit)
        if progress.total and progress.done >= progress.total and progress.unit == "bytes":
            self._drop(progress.name)

    def _task(self, name: str, done: float, total: float, unit: str) -> None:
        if self.live is None:
            self.live = _bars()
            self.live.start()
        known = self.tasks.get(name)
        if known is None:
            task = self.live.add_task(clean(name)[:60], total=total or None, said="")
            self.tasks[name] = known = (task, time.monotonic())
        said = ""
        if unit == "bytes" and done:
            rate = done / max(time.monotonic() - known[1], 0.01)
            said = f"{size(done)} of {size(total)}, {size(rate)}/s"
        elif total:
            said = f"{done:.0f}/{total:.0f}"
        self.live.update(known[0], completed=done, total=total or None, said=said)

    def _drop(self, name: str) -> None:
        known = self.tasks.pop(name, None)
        if known is not None and self.live is not None:
            self.live.remove_task(known[0])
            if not self.tasks:
                self.rest()


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def size(count: float) -> str:
    """Bytes in the largest unit that leaves at least one: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def ago(moment: float | None, now: float | None = None) -> str:
    """How long since a Unix time: 42 s, 3 min, 2.5 h, 3 d."""
    if not moment:
        return "-"
    return span((now or time.time()) - moment)


def span(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0, seconds):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} d"


def folded(text: str, indent: int = 0, width: int = 0) -> list[str]:
    """Lines that fit on the screen once they are indented; words stay whole."""
    import shutil
    import textwrap

    width = (width or shutil.get_terminal_size((100, 24)).columns) - indent
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)


def table(rows: Sequence[tuple[str, ...]], headings: tuple[str, ...], width: int = 0) -> None:
    """Columns as wide as their content; the last one gives way where the screen ends."""
    import shutil

    width = width or shutil.get_terminal_size((100, 24)).columns
    cells = [tuple(clean(c).replace("\n", " ") for c in row) for row in rows]
    widths = [max(len(row[i]) for row in [headings, *cells]) for i in range(len(headings))]
    room = width - sum(w + 2 for w in widths[:-1])
    for index, row in enumerate([headings, *cells]):
        last = row[-1] if len(row[-1]) <= room else row[-1][: max(room - 1, 8)] + "…"
        line = "  ".join([*(c.ljust(w) for c, w in zip(row[:-1], widths, strict=False)), last])
        click.echo(click.style(line, dim=True) if index == 0 else line)


def draw_checks(checks: Sequence[Check], width: int = 0) -> None:
    """What `doctor` and `course check` found. On a terminal words stay whole; commands are not
    broken, since they are copied."""
    wrapped = bool(width) or sys.stdout.isatty()
    for one in checks:
        mark = click.style("ok", fg="green") if one.ok else click.style("!!", fg="red")
        if one.skipped:
            mark = click.style("--", fg="yellow")
        if one.ok and one.warning:
            mark = click.style("! ", fg="yellow")
        text = clean(f"{one.name}: {one.detail}")
        if wrapped:
            text = "\n    ".join(folded(text, 4, width))
        click.echo(f"{mark}  {text}")
        if one.next:
            click.echo(f"      next: {clean(one.next)}")


def as_json(body: dict[str, Any]) -> None:
    """One object with a version, on standard output."""
    import msgspec

    click.echo(json.dumps({"version": 1, **msgspec.to_builtins(body)}, indent=2))

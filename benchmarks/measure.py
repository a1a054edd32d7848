"""Timing of whole processes, one after the other in turn, and what is said about it."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# One piece of work; it takes the round's number and raises when the work was not done.
#
# What it returns is its figure, in seconds; where that is None, its wall time is.
Work = Callable[[int], float | None]


def nothing(number: int) -> None:
    """Before or after a piece of work that needs neither."""


class NotDoneError(Exception):
    """A side did not do the work that it was timed for."""


@dataclass
class Row:
    """One side of a comparison. `seconds` has one figure per round."""

    group: str
    name: str
    work: Work
    # At most so many times the baseline; None where none was set.
    target: float | None = None
    # At most so long, whatever the baseline takes.
    target_s: float | None = None
    # The row that is its baseline, by name; the group's first row if "".
    against: str = ""
    # What each round begins from; not timed.
    before: Work = nothing
    # The proof that the work was done; not timed.
    after: Work = nothing
    seconds: list[float] = field(default_factory=list)

    @property
    def spread_s(self) -> float:
        """Between the quartiles: half of the figures lie within it."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def in_turn(rows: Sequence[Row], rounds: int, pause_s: float = 0.0) -> None:
    """Every row once per round, so that a slow minute of the machine falls on all of them.

    A first round is thrown away: caches fill, byte code is written. `pause_s` lies before each
    row, so that what one leaves running (a container that ends, a tmux session) slows no other.
    """
    for number in range(rounds + 1):
        for row in rows:
            row.before(number)
            time.sleep(pause_s)
            begun = time.perf_counter()
            figure = row.work(number)
            took = time.perf_counter() - begun
            row.after(number)
            if number > 0:
                row.seconds.append(took if figure is None else figure)


def ratio(row: Row, baseline: Row) -> float:
    """The median over the rounds of row's time by the baseline's in the same round."""
    pairs = zip(row.seconds, baseline.seconds, strict=True)
    return statistics.median(one / other for one, other in pairs)


def environment(home: Path) -> dict[str, str]:
    """What every side runs with: a home of its own, and Python as a user has it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "XDG_")) and name != "LABCTL_STATE_DIR"
    }
    return {**kept, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}


@dataclass(frozen=True)
class Call:
    """A process as a piece of work: it must end with 0 and say `expects` so many `times`.

    `{n}` in its words becomes the round's number.
    """

    argv: tuple[str, ...]
    home: Path
    cwd: Path
    expects: str = ""
    times: int = 1

    def __call__(self, number: int) -> None:
        words = [word.replace("{n}", str(number)) for word in self.argv]
        done = subprocess.run(
            words,
            cwd=self.cwd,
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        heard = (done.stdout + done.stderr).count(self.expects)
        if done.returncode != 0 or heard < self.times:
            said = (done.stderr or done.stdout).strip()[-600:]
            raise NotDoneError(f"{' '.join(words)} ended with {done.returncode}: {said}")

"""Timing of whole processes that take turns, and statistics about it."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track

# A piece of work. It takes the round's number, and raises if the work was not done.
#
# It returns its figure in seconds, or None for its wall time.
Work = Callable[[int], float | None]


def nothing(number: int) -> None:
    """Do nothing, before or after a piece of work that needs no preparation."""


class NotDoneError(Exception):
    """A side did not do the work that it was timed for."""


@dataclass
class Row:
    """One side of a comparison. `seconds` has one figure per round."""

    group: str
    name: str
    work: Work
    # the limit as a multiple of the baseline; None without one
    target: float | None = None
    # the limit in seconds, independent of the baseline
    target_s: float | None = None
    # the name of the baseline row; "" for the group's first row
    against: str = ""
    # prepares each round; not timed
    before: Work = nothing
    # checks that the work was done; not timed
    after: Work = nothing
    seconds: list[float] = field(default_factory=list)

    @property
    def spread_s(self) -> float:
        """Return the distance between the quartiles, which contains half of the figures."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def in_turn(rows: list[Row], rounds: int, pause_s: float = 0.0) -> list[Row]:
    """Run every row once per round, so that a slow minute of the machine affects all rows.

    Returns the rows, with a figure for each round.

    A first round is thrown away: caches fill, byte code is written. `pause_s` lies before each
    row, so that what one leaves running (a container that ends, a tmux session) slows no other.
    """
    turns = [(number, row) for number in range(rounds + 1) for row in rows]
    group = rows[0].group
    for number, row in track(turns, group, console=Console(stderr=True), transient=True):
        row.before(number)
        time.sleep(pause_s)
        begun = time.perf_counter()
        figure = row.work(number)
        took = time.perf_counter() - begun
        row.after(number)
        if number > 0:
            row.seconds.append(took if figure is None else figure)
    return rows


def ratio(row: Row, baseline: Row) -> float:
    """Return the median over the rounds of the row's time divided by the baseline's."""
    pairs = zip(row.seconds, baseline.seconds, strict=True)
    return statistics.median(one / other for one, other in pairs)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of every side: its own home, and Python as a user has it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "XDG_")) and name != "LABCTL_STATE_DIR"
    }
    return {**kept, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}


@dataclass(frozen=True)
class Call:
    """Return a process as a piece of work: it must exit with 0 and print `expects` `times` times.

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
            raise NotDoneError(f"{' '.join(words)} exited with {done.returncode}: {said}")

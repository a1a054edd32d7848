"""Rows that take turns, the figures of each, and statistics about them."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

# A piece of work. It takes the round's number, and raises if the work was not done.
#
# It returns its figure in the row's unit, or None for its wall time in seconds.
Work = Callable[[int], float | None]


def nothing(number: int) -> None:
    """Do nothing, before or after a piece of work that needs no preparation."""


class NotDoneError(Exception):
    """A side did not do the work that it was measured for."""


@dataclass
class Row:
    """One side of a comparison. `figures` has one figure per round, in `unit`."""

    name: str
    work: Work
    # the limit as a multiple of the baseline; None without one
    target: float | None = None
    # the limit in the row's unit, independent of the baseline
    limit: float | None = None
    # the name of the baseline row: "" for the comparison's first row, its own name for none
    against: str = ""
    unit: str = "s"
    # whether labctl does the work; rows with a target or a limit are labctl's
    ours: bool = False
    # prepares each round; not measured
    before: Work = nothing
    # checks that the work was done; not measured
    after: Work = nothing
    figures: list[float] = field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        return self.ours or self.target is not None or self.limit is not None

    @property
    def spread(self) -> float:
        """Return the distance between the quartiles, which contains half of the figures."""
        if len(self.figures) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.figures, n=4, method="inclusive")
        return high - low

    @property
    def median(self) -> float:
        return statistics.median(self.figures)

    def take_turn(self, number: int, pause_s: float) -> None:
        """Do the work of one round, and keep its figure.

        The first round fills caches and writes byte code: its figure is kept only until the second
        round has one.
        """
        self.before(number)
        time.sleep(pause_s)
        begun = time.perf_counter()
        figure = self.work(number)
        took_s = time.perf_counter() - begun
        self.after(number)
        if number <= 1:
            self.figures.clear()
        self.figures.append(took_s if figure is None else figure)


@dataclass(frozen=True)
class Comparison:
    """Rows of the same work. The first row is the baseline of all that name no other.

    Every row takes one turn per round, so that a slow minute of the machine affects all rows.
    `pause_s` lies before each turn, so that what one leaves running (a container that ends, a tmux
    session) slows no other.
    """

    title: str
    rows: list[Row]
    # beside the first round, whose figures are discarded; 0 keeps those of the only round
    rounds: int
    pause_s: float = 0.0
    # checks the work of all rounds at the end; it takes the last round's number
    finish: Work = nothing

    def baseline(self, row: Row) -> Row | None:
        """Return the row that this one is compared with."""
        named = {other.name: other for other in self.rows}
        baseline = named[row.against] if row.against else self.rows[0]
        return None if baseline is row else baseline

    def is_baseline(self, row: Row) -> bool:
        """Return whether other rows are compared with this one."""
        return any(self.baseline(other) is row for other in self.rows)

    def keep_judged(self) -> Comparison:
        """Return it without the rows that no verdict needs: alternatives beside the baseline."""
        ours = [row for row in self.rows if row.is_ours]
        needed = {id(row) for row in (*ours, *(self.baseline(row) for row in ours))}
        return replace(self, rows=[row for row in self.rows if id(row) in needed])


def ratio(row: Row, baseline: Row) -> float:
    """Return the median over the rounds of the row's figure divided by the baseline's."""
    # in a round that goes on, the baseline is one figure ahead
    pairs = zip(row.figures, baseline.figures, strict=False)
    return statistics.median(figure / other for figure, other in pairs)


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
        printed = (done.stdout + done.stderr).count(self.expects)
        if done.returncode != 0 or printed < self.times:
            message = (done.stderr or done.stdout).strip()[-600:]
            raise NotDoneError(f"{' '.join(words)} exited with {done.returncode}: {message}")

"""The values of a sweep's trials, as its study records them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from labctl.config.sweep import Direction
from labctl.model import Value

TrialState: TypeAlias = Literal["running", "complete", "pruned", "failed"]


class Placement(Value, frozen=True):
    """Where an attempt of a trial runs. It is on disk before the run is requested.

    `place` is which of the trials side by side on the server it is.
    """

    attempt: int
    rank: int
    server_id: str
    place: int
    run: str


class Trial(Value, frozen=True):
    """A trial. `params` are the texts of its options, `value` its metric once that is known.

    `reached` is the last step whose value is recorded, None before the first. `seconds` is how
    long its runs took. `is_stopping` says that the pruner has ended it, which its run may not know
    yet. `why` says why it failed; of a running trial, why its ended run does not count yet.
    `run_has_ended` is whether this machine knows that its last run has ended.
    """

    number: int
    state: TrialState
    params: dict[str, str]
    value: float | None = None
    reached: int | None = None
    placement: Placement | None = None
    is_stopping: bool = False
    why: str = ""
    seconds: float = 0.0
    run_has_ended: bool = False

    @property
    def state_text(self) -> str:
        """Its state for people: an open trial whose run has ended does not run any more."""
        if self.state != "running" or not (self.why or self.run_has_ended):
            return self.state
        return "ended, no metric" if self.why else "ended, not counted yet"

    @property
    def run(self) -> str:
        """The name of its last run; "" before it has one."""
        return self.placement.run if self.placement else ""


def sort_best_first(trials: Sequence[Trial], direction: Direction) -> list[Trial]:
    """Sort complete trials from the best; after them pruned, running and failed ones by number."""
    order = ("complete", "pruned", "running", "failed")
    sign = -1.0 if direction == "maximize" else 1.0

    def key(trial: Trial) -> tuple[int, float, int]:
        has_rank = trial.state == "complete" and trial.value is not None
        value = sign * trial.value if has_rank and trial.value is not None else math.inf
        return order.index(trial.state), value, trial.number

    return sorted(trials, key=key)


def find_best(trials: Sequence[Trial], direction: Direction) -> Trial | None:
    """Return the best complete trial; None without one."""
    first = next(iter(sort_best_first(trials, direction)), None)
    return first if first is not None and first.state == "complete" else None

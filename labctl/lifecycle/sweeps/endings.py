"""Why a trial failed, and when failures end the whole sweep."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import msgspec

from labctl.config.reader import find_nearest
from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.lifecycle.sweeps.metric import Reading, describe_names
from labctl.lifecycle.sweeps.study import Study
from labctl.lifecycle.sweeps.trial_servers import TrialServer
from labctl.lifecycle.sweeps.trials import Trial
from labctl.model import Run, Value
from labctl.runs import outputs
from labctl.servers.context import LabContext

MOST_FAILURES = 3
# The exit code of a program that does not know an option: argparse, click and shells use it.
USAGE_CODE = 2
LOG_LINES = 3
# What a run reports of its course: nobody wants these small or large.
COUNTERS = frozenset(("epoch", "step", "total_steps", "total_epochs"))
HOW_TO_REPORT = (
    'by writing JSON such as {"epoch": 1, "val_loss": 0.5} to the file progress.json in the '
    "directory $LABCTL_LOG_DIR"
)
MOST_LOG_BYTES = 4096


class TrialFailure(Value, frozen=True):
    """Why a trial failed. `log` is the path of its log in the lab, `last_lines` its end.

    A `is_usage` failure is one of the command line, so that other trials would fail too.
    `is_canceled` if the user ended it.
    """

    text: str
    log: str = ""
    last_lines: str = ""
    is_usage: bool = False
    is_canceled: bool = False


def describe_failure(
    context: LabContext, server: TrialServer, run: Run, reading: Reading
) -> TrialFailure | None:
    """Return why an ended trial failed; None for a success. Its log is on this machine then."""
    if run.state == "cancelled":
        return TrialFailure(text="canceled by its user", is_canceled=True)
    if run.exit_code != 0:
        log = _fetch_log(context, server, run)
        where = log or f"run {run.id}"
        return TrialFailure(
            text=f"{run.summary}; log: {where}",
            log=log,
            last_lines=_read_end(context, log),
            is_usage=run.exit_code == USAGE_CODE,
        )
    if reading.last is not None and not math.isfinite(reading.last):
        return TrialFailure(text=f"its metric ended as {reading.last}")
    return None


def _fetch_log(context: LabContext, server: TrialServer, run: Run) -> str:
    """Download the log; return its path in the lab, "" if it could not be downloaded."""
    with contextlib.suppress(LabError):
        outputs.pull(server.context, server.current, [run.id], only=("logs",))
    log = f"runs/{run.id}/logs/run.log"
    return log if (context.config.root / log).is_file() else ""


def _read_end(context: LabContext, log: str) -> str:
    if not log:
        return ""
    with contextlib.suppress(OSError), (context.config.root / log).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - MOST_LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-LOG_LINES:])
    return ""


class FailureStreak:
    """Counts failures in a row, and ends the sweep if there are too many."""

    def __init__(self) -> None:
        self._failures: list[tuple[Trial, TrialFailure]] = []

    def reset(self) -> None:
        """Start a new count: a trial has succeeded."""
        self._failures.clear()

    def add(self, trial: Trial, failure: TrialFailure, study: Study) -> None:
        """Count a failure. PolicyError if more trials would most likely fail too."""
        if failure.is_canceled:
            return
        self._failures.append((trial, failure))
        call = study.options.format_call
        if failure.is_usage and not any(one.state == "complete" for one in study.trials):
            raise PolicyError(
                f"the command of trial {trial.number} does not accept its options",
                why=failure.last_lines or failure.text,
                hint=f"{call(study.find_free_name())}   # with other parameters\n"
                f"{call(study.name)}   # instead, after you correct the program",
            )
        if len(self._failures) >= MOST_FAILURES:
            texts = [f"trial {one.number}: {why.text}" for one, why in self._failures]
            raise PolicyError(
                f"{len(self._failures)} trials in a row failed",
                why="\n".join([*texts, failure.last_lines]).rstrip(),
                hint=f"{call(study.name)}   # after you correct the program",
            )


def make_metric_error(
    study: Study, text: str, reading: Reading, run: Run, running: int
) -> NotFoundError:
    """Return the error for a run that ended well without reporting the metric, as `text` says."""
    others = f"\n{running} more trials are still running" if running > 0 else ""
    new_study = study.options.format_call(study.find_free_name())
    hints = [f"{new_study}   # after you correct the program"]
    why = describe_names(study.plan.metric, reading.names)
    if reading.names:
        hints.insert(0, _suggest_other_metric(study, reading.names))
    else:
        why += f".\nThe program reports one {HOW_TO_REPORT}"
    return NotFoundError(f"run {run.id}: {text}", why=f"{why}{others}", hint="\n".join(hints))


def _suggest_other_metric(study: Study, names: Sequence[str]) -> str:
    """Return the line of a hint that goes on with a metric that the runs do report."""
    if not study.options.metric:
        return (
            f"{study.options.format_call(study.name)}   # after a new `metric:`; this trial counts"
        )
    results = [name for name in names if name not in COUNTERS] or names
    other = find_nearest(study.plan.metric, results) or results[0]
    same_study = msgspec.structs.replace(study.options, metric=other).format_call(study.name)
    return f"{same_study}   # this trial counts"

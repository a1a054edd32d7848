"""The metric of a trial in the files that its run left, once they are on this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

from labctl.errors import LockHeldError
from labctl.lifecycle.sweeps.metric import Reading, read_curve, read_last_progress
from labctl.lifecycle.sweeps.trial_servers import TrialServer
from labctl.model import Run
from labctl.runs import outputs
from labctl.servers.context import LabContext
from labctl.sync.transfer_lock import WAIT_S


def _find_logs(context: LabContext, run: Run) -> Path:
    return context.config.root / "runs" / run.id / "logs"


def download_curve(context: LabContext, server: TrialServer, run: Run, metric: str) -> Reading:
    """Download the run's logs, and read the metric's curve; an empty one without it."""
    wait_s = WAIT_S if run.has_ended else 0.0
    with contextlib.suppress(LockHeldError):
        outputs.pull(server.context, server.current, [run.id], only=("logs",), wait_s=wait_s)
    with contextlib.suppress(OSError):
        return read_curve(_find_logs(context, run), metric)
    return Reading()


def read_unreported(context: LabContext, run: Run, metric: str) -> object:
    """Return a metric in the downloaded progress.json that the agent does not report, such as NaN.

    None without one.
    """
    return read_last_progress(_find_logs(context, run), metric)


def describe_missing_metric(context: LabContext, run: Run, metric: str) -> str:
    """Say why a run has no metric: it does not report it, or what it reports is no number."""
    value = read_unreported(context, run, metric)
    if value is None:
        return f"it does not report {metric}"
    return f"it reports {metric} as {str(value)[:50]!r}, which is not a number"

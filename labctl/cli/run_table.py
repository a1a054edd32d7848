"""The runs of a lab as a table: which of them are listed, and what their rows say."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from labctl.cli.tables import print_table
from labctl.cli.wrapping import print_message
from labctl.text import elapsed_text

if TYPE_CHECKING:
    from labctl.lifecycle.lab_status import LabStatus
    from labctl.model import Run, Server

# runs that have ended, in the list without --all
SHOWN_ENDED = 5


def select_runs(runs: Sequence[Run], server: Server | None, all_: bool) -> tuple[list[Run], int]:
    """Return the runs to list, the newest first, and the number of the others."""
    if all_:
        return list(runs), 0
    ended = [run for run in runs if not _is_active(run, server)]
    hidden = {run.id for run in ended[SHOWN_ENDED:]}
    return [run for run in runs if run.id not in hidden], len(hidden)


def _is_active(run: Run, server: Server | None) -> bool:
    return not run.has_ended and server is not None and run.server_id == server.id


def print_runs(runs: list[Run], server: Server | None, status: LabStatus) -> None:
    """Print the runs as a table, then those that have lost their GPU."""
    now, ended = status.now, status.ended

    def make_row(run: Run) -> tuple[str, ...]:
        steps = _steps_text(run)
        if run.id in status.measured:  # the server only knows that labctl canceled it
            return run.id, "measured", steps, _elapsed_text(run, now), "probe ended as planned"
        if run.has_ended or _is_active(run, server):
            result = run.summary or shlex.join(run.command)
            return run.id, run.state_text, steps, _elapsed_text(run, now), result
        elapsed = _elapsed_text(run, run.seen_at or now)
        why = ended.get(run.server_id)
        result = f"its server ended: {why}" if why else "its server ended for an unknown reason"
        return run.id, "unknown", steps, elapsed, result

    click.echo()
    headings = ("RUN", "STATE", "STEPS", "TIME", "RESULT")
    print_table([make_row(run) for run in runs], headings, cut=False, optional=("STEPS", "TIME"))
    for run in runs:
        if run.state == "running" and run.gpu_lost_at is not None:
            print_message(f"{run.id} has lost its GPU", err=False, fg="red")
            click.echo(f"  next: labctl explain {run.id}")


def _steps_text(run: Run) -> str:
    step, total = run.progress.get("step"), run.progress.get("total_steps")
    if step is None:
        return "-"
    return f"{step:.0f}/{total:.0f}" if total else f"{step:.0f}"


def _elapsed_text(run: Run, now: float) -> str:
    start = run.started_at or run.created_at
    if not start:
        return "-"
    end = run.ended_at or (run.seen_at if run.has_ended else now)
    return elapsed_text(end - start)

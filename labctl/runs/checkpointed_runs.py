"""The runs that have checkpoints: what to name where the chosen run has none."""

from __future__ import annotations

from pathlib import Path

from labctl.model import Run
from labctl.servers.context import LabContext
from labctl.shell import command

NONE_HAS_ANY = "no other run has any (last known)"


def has_saved_none(run: Run) -> bool:
    """Whether the run's record says that it ended without a checkpoint.

    The record of a lost run says nothing: its server did not answer any more.
    """
    return run.has_ended and run.state != "lost" and not run.has_checkpoints


def is_pulled(context: LabContext, run_id: str) -> bool:
    """Whether a file of the run's checkpoints is on this machine."""
    directory = _find_directory(context, run_id)
    return any(path.is_file() for path in directory.rglob("*"))


def find_other_run(context: LabContext, run_id: str) -> Run | None:
    """Return the latest other run with checkpoints here or on the lab's server, or None."""
    server = context.state.get_lab_server(context.lab_id)
    server_id = server.id if server is not None else ""
    for run in reversed(context.state.list_runs(context.lab_id)):
        if run.id == run_id or run.is_auxiliary:
            continue
        if (run.has_checkpoints and run.server_id == server_id) or is_pulled(context, run.id):
            return run
    return None


def suggest_other_run(context: LabContext, run_id: str, *words: str, on_server: bool) -> str:
    """Return the line of a hint that does `words` with the latest other run that has checkpoints.

    Without `on_server`, the command needs files on this machine, and the line pulls them first.
    Returns "" if no other run has any.
    """
    other = find_other_run(context, run_id)
    if other is None:
        return ""
    call = command(*words, other.id)
    if not on_server and not is_pulled(context, other.id):
        call = command("labctl", "pull", other.id).chain(call)
    return f"{call.render()}   # the latest run with checkpoints"


def _find_directory(context: LabContext, run_id: str) -> Path:
    return context.config.root / "runs" / run_id / "checkpoints"

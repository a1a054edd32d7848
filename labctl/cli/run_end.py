"""What is printed about a run that has ended: how, and what can be done next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.cli.exit_codes import clean
from labctl.cli.wrapping import print_message
from labctl.wire.runs import GPU_LEASE

if TYPE_CHECKING:
    from labctl.model import Run


def print_run(run: Run) -> None:
    """Print how the run ended, and the next command."""
    if not run.has_ended:
        print_message(f"labctl logs -f {run.id}    follow its log")
        return
    print_message(f"run {run.id}: {clean(run.summary)}")
    if run.stopped_by == GPU_LEASE:
        print_message(f"labctl run --recover --id {run.id}    resume it when a GPU is free")
    elif run.stopped_by:
        print_message(f"labctl up && labctl run --recover --id {run.id}    resume it")
    elif run.state == "cancelled":
        print_how_to_continue(run)
    elif run.exit_code:
        print_message(f"labctl explain {run.id}    why, and what to try next")


def print_how_to_continue(run: Run) -> None:
    """Name what is left of a canceled run. Nothing resumes it; a new run can use its results."""
    pull = f"labctl pull {run.id}"
    if not run.has_checkpoints:
        print_message(f"{pull}    download its logs")
        return
    print_message(f"{pull}    download its checkpoints and logs")
    print_message(describe_data_line(run.id))


def describe_data_line(run_id: str) -> str:
    """Describe the line of lab.yaml that gives a new run the downloaded checkpoints of `run_id`.

    It is indented as the lines that `labctl init` writes, so that it can be pasted.
    """
    text = "A new run continues from them with this line below data: in lab.yaml:"
    return f"{text}\n  start: ./runs/{run_id}/checkpoints"

"""What to say of a lab's other runs that are active when a run starts or is canceled."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.text import names_text

MOST_NAMED = 3


def describe_runs_beside(names: Sequence[str]) -> str:
    """Describe the runs, the newest first, that are active beside the run that just started."""
    runs_are, them = ("run {} is", "it") if len(names) == 1 else ("runs {} are", "them")
    still = runs_are.format(names_text(names, MOST_NAMED))
    newest = names[0]
    return (
        f"{still} still running on this server; this run started beside {them}. "
        f"To follow {newest}: labctl logs -f {newest}; to stop it: labctl cancel {newest}"
    )


def describe_remaining_runs(names: Sequence[str]) -> str:
    """Describe the runs that are still active after a run was canceled."""
    runs_are = "run {} is" if len(names) == 1 else "runs {} are"
    still = runs_are.format(names_text(names, MOST_NAMED))
    return f"{still} still running; to stop {names[0]}: labctl cancel {names[0]}"

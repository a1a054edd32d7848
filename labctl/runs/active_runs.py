"""What to say of a lab's other runs that are active when a run starts or is canceled."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.text import names_text

MOST_NAMED = 3


def describe_runs_beside(names: Sequence[str]) -> str:
    """Describe the runs, the newest first, that are active beside the run that just started."""
    newest, them = names[0], "it" if len(names) == 1 else "them"
    return (
        f"{_name_active(names)} on this server; this run started beside {them}\n"
        f"  labctl logs -f {newest}   follow {newest}\n"
        f"  labctl cancel {newest}    stop {newest}"
    )


def describe_runs_beside_profile(names: Sequence[str]) -> str:
    """Describe the runs, the newest first, that are active beside a profile."""
    return (
        f"{_name_active(names)} on this server, so the timings of this profile are affected. "
        f"To stop {names[0]}: labctl cancel {names[0]}"
    )


def describe_runs_beside_probe(names: Sequence[str]) -> str:
    """Describe the runs, the newest first, that are active beside a probe."""
    return (
        f"{_name_active(names)} on this server, so the estimate of this probe is affected. "
        f"To stop {names[0]}: labctl cancel {names[0]}"
    )


def describe_remaining_runs(names: Sequence[str]) -> str:
    """Describe the runs that are still active after a run was canceled."""
    return f"{_name_active(names)}; to stop {names[0]}: labctl cancel {names[0]}"


def _name_active(names: Sequence[str]) -> str:
    runs_are = "run {} is" if len(names) == 1 else "runs {} are"
    return f"{runs_are.format(names_text(names, MOST_NAMED))} still running"

"""The jobs of a class in Slurm's accounting: how they ended, what they used, how long they waited.

Pure functions; nothing runs here.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

from labctl.commands.slurm_accounting import parse_gpus
from labctl.model import Value

# The line before the jobs in a script's output
HEADING = "--- jobs"
_FIELDS = ("User", "State", "Eligible", "Start", "End", "ExitCode", "ElapsedRaw", "AllocTRES")
HOUR_S = 3600
# How sacct writes that a script ended with 143 (it subtracts 128), or was ended by SIGTERM itself
_TERMINATED = ("15:0", "143:0", "0:15")
# How Slurm names the ends that are counted; every other one is `other`.
_ENDS = {
    "COMPLETED": "completed",
    "FAILED": "failed",
    "TIMEOUT": "timed_out",
    "DEADLINE": "timed_out",
    "OUT_OF_MEMORY": "out_of_memory",
    "PREEMPTED": "preempted",
    "CANCELLED": "canceled",
}


class ClassJobs(Value, frozen=True):
    """How the jobs of one user have ended, and how long they waited.

    A job that Slurm starts again counts once for each start. `canceled` includes jobs that ended by
    SIGTERM, which `labctl cancel` sends. `other` are starts that ended because a machine failed, or
    because the job was queued again. `gpu_hours` are those of ended jobs. `median_wait_s` is from
    when a job could have started to its start; None if none has started.
    """

    completed: int = 0
    failed: int = 0
    timed_out: int = 0
    out_of_memory: int = 0
    preempted: int = 0
    canceled: int = 0
    other: int = 0
    gpu_hours: float = 0.0
    last_end_at: float | None = None
    median_wait_s: float | None = None


def build_query(account: str) -> str:
    """Return the script that prints all jobs of a class's account, for `parse_jobs`."""
    return (
        f"echo '{HEADING}' && SLURM_TIME_FORMAT=%s sacct -nXPDa -A {account} -S 2000-01-01 "
        f"--format={','.join(_FIELDS)}"
    )


def parse_jobs(output: str) -> dict[str, ClassJobs]:
    """Parse what the script of `build_query` prints, into the jobs of each user."""
    rows: dict[str, list[list[str]]] = {}
    for line in output.partition(f"{HEADING}\n")[2].splitlines():
        user, *fields = line.split("|")
        if user and len(fields) == len(_FIELDS) - 1:
            rows.setdefault(user, []).append(fields)
    return {user: _summarize(own_rows) for user, own_rows in rows.items()}


def _summarize(rows: list[list[str]]) -> ClassJobs:
    counts: Counter[str] = Counter()
    waits_s: list[float] = []
    last_end_at: float | None = None
    gpu_seconds = 0
    for state, eligible, start, end, exit_code, elapsed, tres in rows:
        eligible_at, start_at, end_at = map(_parse_time, (eligible, start, end))
        # A job that was canceled in the queue has allocated nothing.
        if start_at is not None and eligible_at is not None and tres:
            waits_s.append(max(0.0, start_at - eligible_at))
        if end_at is None:
            continue
        counts[_name_end(state, exit_code)] += 1
        gpu_seconds += int(elapsed) * (parse_gpus(tres) or 0)
        last_end_at = max(end_at, last_end_at or 0.0)
    return ClassJobs(
        **counts,
        gpu_hours=gpu_seconds / HOUR_S,
        last_end_at=last_end_at,
        median_wait_s=median(waits_s) if waits_s else None,
    )


def _name_end(state: str, exit_code: str) -> str:
    if state == "FAILED" and exit_code in _TERMINATED:
        return "canceled"
    return _ENDS.get(state.partition(" ")[0], "other")  # "CANCELLED by 1000"


def _parse_time(text: str) -> float | None:
    """Parse Unix seconds; None for `Unknown` and `None`."""
    return float(text) if text.isdigit() else None

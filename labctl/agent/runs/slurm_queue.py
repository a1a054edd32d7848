"""What Slurm knows about the jobs of attempts, by the commands of the login node."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...wire.runs import SlurmAttemptRecord
from ..host.docker import run_program
from ..reply import Failure
from . import slurm_commands
from .slurm_commands import GpuLimit, SlurmJob, SlurmStep

if TYPE_CHECKING:
    from subprocess import CompletedProcess

# seconds that Slurm's programs may take; they give up on a silent controller by themselves before
ANSWERS_WITHIN_S = 60.0
POLL_S = 0.5
# exit codes of `timeout`: it ended the command, or did not find it
TIMED_OUT, NOT_FOUND = 124, 127


class UnreachableSlurmError(Failure):
    """The controller of Slurm does not answer, so nothing is known about a job."""

    def __init__(self, why: str) -> None:
        what = "Slurm on the login node does not answer"
        super().__init__(
            "SchedulerBusyError", what, why, "labctl status --refresh   # after a while"
        )


def find_job(record: SlurmAttemptRecord) -> SlurmJob | None:
    return find_jobs([record]).get(record.job_name)


def find_jobs(records: Sequence[SlurmAttemptRecord]) -> dict[str, SlurmJob]:
    """Find the jobs of attempts by their names: in the queue, else in the accounting."""
    if not records:
        return {}
    names = [record.job_name for record in records]
    queue = query(slurm_commands.build_queue_words(names))
    jobs = {job.name: job for job in slurm_commands.parse_queue(queue)}
    missing = [record for record in records if record.job_name not in jobs]
    if missing:
        since_s = min(record.created_at for record in missing)
        names = [record.job_name for record in missing]
        accounting = _query_accounting(names, since_s)
        jobs.update({job.name: job for job in slurm_commands.parse_accounting(accounting)})
    return jobs


def find_gpu_limit(job: SlurmJob) -> GpuLimit | None:
    """Find the limit on GPUs for which a job waits. A cluster may hide its limits from users."""
    if job.reason not in slurm_commands.GPU_REASONS:
        return None
    user = pwd.getpwuid(os.getuid()).pw_name
    shown = run(slurm_commands.build_limits_words(job, user)).stdout
    return slurm_commands.parse_gpu_limit(shown, job, os.getuid())


def has_ended_within(record: SlurmAttemptRecord, limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while True:
        job = find_job(record)
        if job is None or job.state in slurm_commands.ENDED_STATES:
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)


def list_steps() -> list[SlurmStep]:
    """List the steps of this account's jobs that run now."""
    return slurm_commands.parse_steps(query(slurm_commands.LIST_STEPS))


def query(words: Sequence[str]) -> str:
    """Return what a query prints. UnreachableSlurmError if Slurm does not answer it."""
    done = run(words)
    if done.returncode != 0:
        raise UnreachableSlurmError(done.stderr.strip()[-1000:])
    return done.stdout


def _query_accounting(names: Sequence[str], since_s: float) -> str:
    """Return what the accounting prints about jobs; "" on a cluster without one."""
    done = run(slurm_commands.build_accounting_words(names, since_s))
    if done.returncode == 0:
        return done.stdout
    if slurm_commands.has_accounting(query(slurm_commands.SHOW_CONFIG)):
        raise UnreachableSlurmError(done.stderr.strip()[-1000:])
    return ""


def call(words: Sequence[str]) -> None:
    """Have Slurm do something. A job that has ended meanwhile is fine: the caller looks again."""
    run(words)


def run(words: Sequence[str], variables: dict[str, str] | None = None) -> CompletedProcess[str]:
    """Run a command of Slurm. UnreachableSlurmError if it takes too long."""
    limit = ["timeout", f"{ANSWERS_WITHIN_S:.0f}"]
    environment = {**slurm_commands.TIME_ENVIRONMENT, **(variables or {})}
    done = run_program([*limit, *words], stdin="", variables=environment)
    if done.returncode == NOT_FOUND:
        what = f"{words[0]} is not on this login node"
        why = "the commands of Slurm must be on the PATH of a login without a terminal"
        raise Failure("policy", what, why, "labctl doctor")
    if done.returncode == TIMED_OUT:
        raise UnreachableSlurmError(f"{words[0]} took longer than {ANSWERS_WITHIN_S:.0f} s")
    return done

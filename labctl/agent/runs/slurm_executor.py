"""The executor `slurm`: each attempt is a job of Slurm, on machines that share this home directory.

An attempt is submitted once: no other job has the name of its job, and the executor looks for that
name before a submission, and after one whose reply is missing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...wire.runs import SLURM, RunSpec, SlurmAttemptRecord
from ...wire.verbs import CONFIG_FILE
from ..host.paths import drop_tree
from ..reply import Failure
from . import secrets_tmpfs, slurm_commands, slurm_queue
from .attempt_directories import (
    drop_unstarted,
    find_attempt_directory,
    list_attempt_directories,
)
from .environments import is_environment, use_environment
from .executor import (
    Environment,
    JobImage,
    LiveAttempt,
    NewAttempt,
    ProgramState,
    UnknownStartError,
)
from .process_executor import link_server_data
from .slurm_attempts import (
    BATCH,
    BEGAN,
    STEP,
    has_begun,
    is_out_of_memory,
    read_attempt,
    read_start_time,
    read_stop_reason,
    write_attempt,
    write_scripts,
)
from .slurm_commands import SlurmJob
from .slurm_queue import UnreachableSlurmError
from .slurm_reasons import describe_ending, describe_reason

if TYPE_CHECKING:
    from subprocess import CompletedProcess

# seconds that a job may take to end once Slurm was told to kill it
ENDS_WITHIN_S = 120.0


class SlurmExecutor:
    """See `Executor`. An attempt uses an Environment and the cluster's programs, or a JobImage."""

    noun = "job"
    runs_here = False

    def find_image(self, spec: RunSpec) -> Environment | JobImage | None:
        if spec.image and not is_environment(spec.image):
            return JobImage(spec.job.runtime)
        return use_environment(spec.image, spec.lab_id)

    def create(self, attempt: NewAttempt) -> bool:
        _require_supported(attempt.spec)
        directory = find_attempt_directory(attempt.name)
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            return False
        spec = attempt.spec
        name = f"labctl-{attempt.name}-{os.urandom(3).hex()}"
        record = SlurmAttemptRecord(
            spec.id, spec.lab_id, str(attempt.directory), name, created_at=time.time()
        )
        drop_unstarted(attempt, BEGAN)
        if isinstance(attempt.image, Environment):  # a container mounts them
            link_server_data(attempt.root, spec.data)
        write_scripts(directory, attempt)
        write_attempt(attempt.name, record)
        return True

    def start(self, attempt: NewAttempt) -> None:
        record = read_attempt(attempt.name)
        if record is None:
            raise Failure("server", f"the records of run {attempt.spec.id} are missing")
        try:
            job = slurm_queue.find_job(record)
        except Failure:
            drop_tree(find_attempt_directory(attempt.name))  # nothing was submitted
            raise
        job_id = job.id if job else _submit(attempt, record)
        write_attempt(attempt.name, record._replace(job_id=job_id))

    def stop(self, name: str, grace_s: int) -> None:
        record = read_attempt(name)
        job = slurm_queue.find_job(record) if record else None
        if record is None or job is None or job.state in slurm_commands.ENDED_STATES:
            return
        if job.state not in slurm_commands.QUEUED_STATES:
            slurm_queue.call(slurm_commands.build_signal_words(job.id, "TERM"))
            if slurm_queue.has_ended_within(record, grace_s):
                return
        slurm_queue.call(slurm_commands.build_cancel_words(job.id))
        slurm_queue.has_ended_within(record, ENDS_WITHIN_S)

    def send_signal(self, name: str, number: int) -> None:
        record = read_attempt(name)
        job = slurm_queue.find_job(record) if record else None
        if job and number == signal.SIGKILL:
            slurm_queue.call(slurm_commands.build_cancel_words(job.id))
        elif job:
            name = signal.Signals(number).name[len("SIG") :]
            slurm_queue.call(slurm_commands.build_signal_words(job.id, name))

    def inspect(self, names: Sequence[str]) -> dict[str, ProgramState]:
        records = {name: record for name in names if (record := read_attempt(name))}
        jobs = slurm_queue.find_jobs(list(records.values()))
        return {
            name: describe_program(name, record, jobs.get(record.job_name))
            for name, record in records.items()
        }

    def list_live(self, lab_id: str = "") -> list[LiveAttempt]:
        records = {
            directory.name: record
            for directory in list_attempt_directories()
            if (record := read_attempt(directory.name)) and lab_id in ("", record.lab_id)
        }
        programs = self.inspect(list(records))
        return [
            LiveAttempt(SLURM, name, record.run, record.lab_id, Path(record.directory))
            for name, record in records.items()
            if programs[name].status == "running"
        ]

    def remove(self, name: str) -> None:
        record = read_attempt(name)
        job = slurm_queue.find_job(record) if record else None
        if job and job.state not in slurm_commands.ENDED_STATES:
            slurm_queue.call(slurm_commands.build_cancel_words(job.id))
        drop_tree(find_attempt_directory(name))

    def build_exec_words(self, name: str, command: Sequence[str]) -> list[str]:
        record = read_attempt(name)
        job_id = record.job_id if record else ""
        step = str(find_attempt_directory(name) / STEP)
        return slurm_commands.build_step_words(job_id or "0", [step, *command])

    def build_wait_words(self, name: str) -> list[str]:
        """Look at the shared file system often, and ask Slurm seldom: it serves a whole cluster."""
        record = read_attempt(name)
        if record is None:
            return ["true"]
        exit_file = str(Path(record.directory) / ".labctl" / "exit.json")
        script = (
            'looks=0; while [ ! -e "$1" ]; do sleep 0.5; looks=$((looks + 1)); '
            "[ $((looks % 20)) = 0 ] || continue; "
            'queue=$(squeue --me -h -n "$2") && [ -z "$queue" ] && exit 0; done'
        )
        return ["sh", "-c", script, "wait", exit_file, record.job_name]

    def read_console(self, name: str) -> str:
        """Return nothing: what the job prints before its log is open goes to the log too."""
        return ""


def find_newest_job(lab_id: str) -> tuple[str, str]:
    """Find the newest running run of a lab: its id, and its job's. Failure (missing) if none."""
    live = [read_attempt(attempt.name) for attempt in SlurmExecutor().list_live(lab_id)]
    submitted = [record for record in live if record is not None and record.job_id]
    if submitted:
        # Not the time of its directory: each start of a job changes that.
        newest = max(submitted, key=lambda record: record.created_at)
        return newest.run, newest.job_id
    raise Failure(
        "missing",
        "no run of this lab is running on the cluster",
        "labctl reaches a machine of the cluster only through the job of a run there",
        "labctl run --detach\nlabctl status --refresh   # shows when the run has started",
    )


def _require_supported(spec: RunSpec) -> None:
    if spec.tty:
        what = f"run {spec.id} cannot have a terminal (-it)"
        why = "Slurm starts it later, on another machine"
        hint = f"labctl run --id {spec.id}\nlabctl exec {spec.id}   # a shell beside it"
        raise Failure("policy", what, why, hint)


def _submit(attempt: NewAttempt, record: SlurmAttemptRecord) -> str:
    """Submit an attempt that has no job, and return the job's id. Failure if Slurm refuses it.

    UnknownStartError if nobody knows whether Slurm has it: the next call asks again.
    """
    words = slurm_commands.build_sbatch_words(
        record.job_name,
        attempt.spec,
        attempt.directory / "code",
        attempt.directory / "logs" / "run.log",
        find_attempt_directory(attempt.name) / BATCH,
    )
    secrets = secrets_tmpfs.read_secrets(attempt.spec.id)
    done: CompletedProcess[str] | None = None
    cause = ""
    try:
        done = slurm_queue.run(words, secrets)
        if done.returncode == 0 and (job_id := slurm_commands.parse_job_id(done.stdout)):
            return job_id
        cause = done.stderr.strip()[-1500:]
        # The submission may have reached Slurm although its reply did not arrive.
        job = slurm_queue.find_job(record)
    except UnreachableSlurmError as error:
        raise UnknownStartError(
            "SchedulerBusyError",
            f"Slurm did not confirm that it has run {attempt.spec.id}",
            cause or error.report.what,
            f"labctl run --id {attempt.spec.id}   # again later: it starts once",
        ) from None
    # Slurm keeps a record of a job that it refused; it never began.
    if job is not None and (
        job.state not in slurm_commands.ENDED_STATES or has_begun(attempt.name)
    ):
        return job.id
    drop_tree(find_attempt_directory(attempt.name))
    raise Failure("policy", f"Slurm refused run {attempt.spec.id}", cause, _SUGGEST_SETTINGS)


_SUGGEST_SETTINGS = ("change `slurm:` under `server:` in ", CONFIG_FILE)


def describe_program(name: str, record: SlurmAttemptRecord, job: SlurmJob | None) -> ProgramState:
    if job is None:
        if not record.job_id:
            return ProgramState(name, "created")
        summary = f"Slurm has forgotten its job {record.job_id}"
        return ProgramState(name, "ended", exit_code=None, summary=summary)
    if job.state in slurm_commands.QUEUED_STATES:
        summary = describe_reason(job.reason, slurm_queue.find_gpu_limit(job))
        return ProgramState(name, "queued", summary=summary)
    if job.state not in slurm_commands.ENDED_STATES:
        return ProgramState(name, "running", began_at=read_start_time(name))
    summary, began = describe_ending(job.state, read_stop_reason(name)), has_begun(name)
    if job.state == "FAILED" and not began:
        summary = f"Slurm could not start it: {job.reason or 'its accounting has no reason'}"
    return ProgramState(
        name,
        "ended",
        # Slurm has no exit code of a command that it ended itself.
        exit_code=None if summary else job.exit_code,
        ended_at=job.ended_at,
        is_out_of_memory=job.state == "OUT_OF_MEMORY" or is_out_of_memory(name),
        began=began,
        summary=summary,
        began_at=read_start_time(name),
    )

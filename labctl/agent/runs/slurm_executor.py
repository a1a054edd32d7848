"""The executor `slurm`: each attempt is a job of Slurm, on machines that share this home directory.

An attempt has a directory of its own outside of the run's, as a plain process has: what was created
(attempt.json), the script that Slurm runs (batch.sh), the one for a command beside it (step.sh),
and the one that sets the environment (enter.sh). An attempt is submitted once: no other job has the
name of its job, and the executor looks for that name before a submission, and after one whose reply
is missing.
"""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...wire.codec import to_json
from ...wire.runs import SLURM, RunSpec, SlurmAttemptRecord
from ...wire.verbs import CONFIG_FILE
from ..host.docker import run_program
from ..host.paths import drop_tree, labctl_home, read_record, write_json, write_text
from ..reply import Failure
from . import secrets_tmpfs, slurm_commands
from .attempt_directories import find_attempt_directory, list_attempt_directories
from .executor import (
    AttemptImage,
    Environment,
    LiveAttempt,
    NewAttempt,
    ProgramState,
    UnknownStartError,
)
from .process_executor import ENTER, link_server_data
from .slurm_commands import GpuLimit, SlurmJob
from .slurm_reasons import describe_ending, describe_reason

if TYPE_CHECKING:
    from subprocess import CompletedProcess

BATCH, STEP = "batch.sh", "step.sh"
BEGAN = "began"
# seconds that Slurm's programs may take; they give up on a silent controller by themselves before
ANSWERS_WITHIN_S = 60.0
POLL_S = 0.5
# exit codes of `timeout`: it ended the command, or did not find it
TIMED_OUT, NOT_FOUND = 124, 127
# seconds that a job may take to end once Slurm was told to kill it
ENDS_WITHIN_S = 120.0


class UnreachableSlurmError(Failure):
    """The controller of Slurm does not answer, so nothing is known about a job."""

    def __init__(self, why: str) -> None:
        what = "Slurm on the login node does not answer"
        super().__init__(
            "SchedulerBusyError", what, why, "labctl status --refresh   # after a while"
        )


class SlurmExecutor:
    """See `Executor`. An attempt uses the programs of the cluster."""

    noun = "job"
    runs_here = False

    def find_image(self, spec: RunSpec) -> AttemptImage | None:
        return Environment()

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
        _drop_unstarted(attempt)
        link_server_data(attempt.root, spec.data)
        write_text(directory / ENTER, build_enter_script(directory, attempt), 0o700)
        write_text(directory / STEP, build_step_script(directory, attempt), 0o700)
        write_text(directory / BATCH, build_batch_script(directory, attempt), 0o700)
        _write_attempt(attempt.name, record)
        return True

    def start(self, attempt: NewAttempt) -> None:
        record = _read_attempt(attempt.name)
        if record is None:
            raise Failure("server", f"the records of run {attempt.spec.id} are missing")
        try:
            job = _find_job(record)
        except Failure:
            drop_tree(find_attempt_directory(attempt.name))  # nothing was submitted
            raise
        job_id = job.id if job else _submit(attempt, record)
        _write_attempt(attempt.name, record._replace(job_id=job_id))

    def stop(self, name: str, grace_s: int) -> None:
        record = _read_attempt(name)
        job = _find_job(record) if record else None
        if record is None or job is None or job.state in slurm_commands.ENDED_STATES:
            return
        if job.state not in slurm_commands.QUEUED_STATES:
            _call(slurm_commands.build_signal_words(job.id, "TERM"))
            if _has_ended_within(record, grace_s):
                return
        _call(slurm_commands.build_cancel_words(job.id))
        _has_ended_within(record, ENDS_WITHIN_S)

    def send_signal(self, name: str, number: int) -> None:
        record = _read_attempt(name)
        job = _find_job(record) if record else None
        if job and number == signal.SIGKILL:
            _call(slurm_commands.build_cancel_words(job.id))
        elif job:
            name = signal.Signals(number).name[len("SIG") :]
            _call(slurm_commands.build_signal_words(job.id, name))

    def inspect(self, names: Sequence[str]) -> dict[str, ProgramState]:
        records = {name: record for name in names if (record := _read_attempt(name))}
        jobs = _find_jobs(list(records.values()))
        return {
            name: describe_program(name, record, jobs.get(record.job_name))
            for name, record in records.items()
        }

    def list_live(self, lab_id: str = "") -> list[LiveAttempt]:
        records = {
            directory.name: record
            for directory in list_attempt_directories()
            if (record := _read_attempt(directory.name)) and lab_id in ("", record.lab_id)
        }
        programs = self.inspect(list(records))
        return [
            LiveAttempt(SLURM, name, record.run, record.lab_id, Path(record.directory))
            for name, record in records.items()
            if programs[name].status == "running"
        ]

    def remove(self, name: str) -> None:
        record = _read_attempt(name)
        job = _find_job(record) if record else None
        if job and job.state not in slurm_commands.ENDED_STATES:
            _call(slurm_commands.build_cancel_words(job.id))
        drop_tree(find_attempt_directory(name))

    def build_exec_words(self, name: str, command: Sequence[str]) -> list[str]:
        record = _read_attempt(name)
        job_id = record.job_id if record else ""
        step = str(find_attempt_directory(name) / STEP)
        return slurm_commands.build_step_words(job_id or "0", [step, *command])

    def build_wait_words(self, name: str) -> list[str]:
        """Look at the shared file system often, and ask Slurm seldom: it serves a whole cluster."""
        record = _read_attempt(name)
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


def _require_supported(spec: RunSpec) -> None:
    if spec.tty:
        what = f"run {spec.id} cannot have a terminal (-it)"
        why = "Slurm starts it later, on another machine"
        hint = f"labctl run --id {spec.id}\nlabctl exec {spec.id}   # a shell beside it"
        raise Failure("policy", what, why, hint)


def build_enter_script(attempt_directory: Path, attempt: NewAttempt) -> str:
    """Return the script that runs a command in the environment of an attempt, on its machine.

    Secrets are variables of the job, and Slurm sets the variables of its GPUs.
    """
    spec, run = attempt.spec, attempt.directory
    variables = {
        "LABCTL_RUN_ID": spec.id,
        "LABCTL_DATA_DIR": str(attempt.root / "data"),
        "LABCTL_RUN_DIR": str(run),
        "LABCTL_CHECKPOINT_DIR": str(run / "checkpoints"),
        "LABCTL_LOG_DIR": str(run / "logs"),
        "LABCTL_CACHE_DIR": str(labctl_home() / ".cache"),
        "PYTHONUNBUFFERED": "1",
        **spec.env,
        "LABCTL_ATTEMPT": str(attempt_directory),
        "LABCTL_SECRETS_DIR": "/nonexistent",
    }
    if not spec.job.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
    entry = shlex.quote(str(run / ".labctl" / "entry.sh"))
    code = shlex.quote(str(run / "code"))
    return "\n".join(["#!/bin/sh", *lines, f"cd {code} || exit 125", f'exec sh {entry} "$@"', ""])


def build_batch_script(attempt_directory: Path, attempt: NewAttempt) -> str:
    """Return the script of the job."""
    modules = attempt.spec.job.modules
    values = {
        "attempt": str(attempt_directory),
        "run": str(attempt.directory),
        "modules": " ".join(modules),
    }
    return "\n".join(
        [
            _choose_interpreter(modules),
            *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
            f"set -- {' '.join(map(shlex.quote, attempt.spec.command))}",
            Path(__file__).with_name("slurm_batch.sh").read_text(),
        ]
    )


def build_step_script(attempt_directory: Path, attempt: NewAttempt) -> str:
    """Return the script that runs a command beside the program."""
    modules = attempt.spec.job.modules
    lines = [f"module load {shlex.join(modules)} >&2"] if modules else []
    enter = shlex.quote(str(attempt_directory / ENTER))
    return "\n".join(
        [_choose_interpreter(modules), *lines, f'LABCTL_ENTER=1 exec sh {enter} "$@"', ""]
    )


def _choose_interpreter(modules: Sequence[str]) -> str:
    """Return the first line of a script. `module` is a function of login shells."""
    return "#!/bin/bash -l" if modules else "#!/bin/sh"


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
        done = _run(words, secrets)
        if done.returncode == 0 and (job_id := slurm_commands.parse_job_id(done.stdout)):
            return job_id
        cause = done.stderr.strip()[-1500:]
        # The submission may have reached Slurm although its reply did not arrive.
        job = _find_job(record)
    except UnreachableSlurmError as error:
        raise UnknownStartError(
            "SchedulerBusyError",
            f"Slurm did not confirm that it has run {attempt.spec.id}",
            cause or error.report.what,
            f"labctl run --id {attempt.spec.id}   # again later: it starts once",
        ) from None
    # Slurm keeps a record of a job that it refused; it never began.
    if job is not None and (
        job.state not in slurm_commands.ENDED_STATES or _has_begun(attempt.name)
    ):
        return job.id
    drop_tree(find_attempt_directory(attempt.name))
    raise Failure("policy", f"Slurm refused run {attempt.spec.id}", cause, _SUGGEST_SETTINGS)


_SUGGEST_SETTINGS = ("change `slurm:` under `server:` in ", CONFIG_FILE)


def _find_job(record: SlurmAttemptRecord) -> SlurmJob | None:
    return _find_jobs([record]).get(record.job_name)


def _find_jobs(records: Sequence[SlurmAttemptRecord]) -> dict[str, SlurmJob]:
    """Find the jobs of attempts by their names: in the queue, else in the accounting."""
    if not records:
        return {}
    names = [record.job_name for record in records]
    queue = _query(slurm_commands.build_queue_words(names))
    jobs = {job.name: job for job in slurm_commands.parse_queue(queue)}
    missing = [record for record in records if record.job_name not in jobs]
    if missing:
        since_s = min(record.created_at for record in missing)
        names = [record.job_name for record in missing]
        accounting = _query_accounting(names, since_s)
        jobs.update({job.name: job for job in slurm_commands.parse_accounting(accounting)})
    return jobs


def describe_program(name: str, record: SlurmAttemptRecord, job: SlurmJob | None) -> ProgramState:
    if job is None:
        if not record.job_id:
            return ProgramState(name, "created")
        summary = f"Slurm has forgotten its job {record.job_id}"
        return ProgramState(name, "ended", exit_code=None, summary=summary)
    if job.state in slurm_commands.QUEUED_STATES:
        summary = describe_reason(job.reason, _find_gpu_limit(job))
        return ProgramState(name, "queued", summary=summary)
    if job.state not in slurm_commands.ENDED_STATES:
        return ProgramState(name, "running")
    summary, began = describe_ending(job.state), _has_begun(name)
    if job.state == "FAILED" and not began:
        summary = f"Slurm could not start it: {job.reason or 'its accounting has no reason'}"
    return ProgramState(
        name,
        "ended",
        # Slurm has no exit code of a command that it ended itself.
        exit_code=None if summary else job.exit_code,
        ended_at=job.ended_at,
        is_out_of_memory=job.state == "OUT_OF_MEMORY",
        began=began,
        summary=summary,
    )


def _has_begun(name: str) -> bool:
    """Whether Slurm has ever started the script of an attempt."""
    return (find_attempt_directory(name) / BEGAN).exists()


def _find_gpu_limit(job: SlurmJob) -> GpuLimit | None:
    """Find the limit on GPUs for which a job waits. A cluster may hide its limits from users."""
    if job.reason not in slurm_commands.GPU_REASONS:
        return None
    user = pwd.getpwuid(os.getuid()).pw_name
    shown = _run(slurm_commands.build_limits_words(job, user)).stdout
    return slurm_commands.parse_gpu_limit(shown, job, os.getuid())


def _has_ended_within(record: SlurmAttemptRecord, limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while True:
        job = _find_job(record)
        if job is None or job.state in slurm_commands.ENDED_STATES:
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)


def _query(words: Sequence[str]) -> str:
    """Return what a query prints. UnreachableSlurmError if Slurm does not answer it."""
    done = _run(words)
    if done.returncode != 0:
        raise UnreachableSlurmError(done.stderr.strip()[-1000:])
    return done.stdout


def _query_accounting(names: Sequence[str], since_s: float) -> str:
    """Return what the accounting prints about jobs; "" on a cluster without one."""
    done = _run(slurm_commands.build_accounting_words(names, since_s))
    if done.returncode == 0:
        return done.stdout
    if slurm_commands.has_accounting(_query(slurm_commands.SHOW_CONFIG)):
        raise UnreachableSlurmError(done.stderr.strip()[-1000:])
    return ""


def _call(words: Sequence[str]) -> None:
    """Have Slurm do something. A job that has ended meanwhile is fine: the caller looks again."""
    _run(words)


def _run(words: Sequence[str], variables: dict[str, str] | None = None) -> CompletedProcess[str]:
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


def _drop_unstarted(attempt: NewAttempt) -> None:
    """Drop earlier attempts of the run that Slurm does not have.

    Should a submission arrive after all, its job ends at once without its directory.
    """
    for directory in (labctl_home() / ".attempts").iterdir():
        record = _read_attempt(directory.name)
        is_own = record is not None and record.directory == str(attempt.directory)
        if is_own and directory.name != attempt.name and not (directory / BEGAN).exists():
            drop_tree(directory)


def _read_attempt(name: str) -> SlurmAttemptRecord | None:
    return read_record(SlurmAttemptRecord, find_attempt_directory(name) / "attempt.json")


def _write_attempt(name: str, record: SlurmAttemptRecord) -> None:
    write_json(find_attempt_directory(name) / "attempt.json", to_json(record))

"""Command lines of Slurm, and what they print in fields that these ask for."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...wire.runs import RunSpec

# Slurm sends SIGTERM this long before a job's time limit, and up to a minute earlier.
WARNING_S = 120
MIB = 1024**2
# Both programs then print times as Unix seconds.
TIME_ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s"}
_QUEUE_FIELDS = ("JobID", "Name", "State", "Reason", "exit_code", "EndTime", "QOS", "Account")
_ACCOUNTING_FIELDS = ("JobIDRaw", "JobName", "State", "ExitCode", "End")
DAY_S = 86_400
# Reasons to wait that are a limit on GPUs, and how Slurm writes one: LIMIT(USED)
GPU_REASONS = ("AssocGrpGRES", "MaxGRESPerAccount", "QOSGrpGRES", "QOSMaxGRESPerUser")
_GPUS = r"\bgres/gpu(?::[^=,]+)?=(\d+)\((\d+)\)"

QUEUED_STATES = {
    *("PENDING", "CONFIGURING", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
}
ENDED_STATES = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}


class SlurmJob(NamedTuple):
    """A job of Slurm. `exit_code` counts only in an ended one, as a shell has it: 143 for SIGTERM.

    `ended_at` is in Unix seconds of the controller's clock, None while it is unknown.
    """

    id: str
    name: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    ended_at: float | None = None
    qos: str = ""
    account: str = ""


class SlurmStep(NamedTuple):
    """A running step of a job. `id` has the job's, as in 17.2."""

    id: str
    name: str


class GpuLimit(NamedTuple):
    """How many GPUs may be in use at once, and how many are."""

    used: int
    limit: int


def build_sbatch_words(name: str, spec: RunSpec, code: Path, log: Path, script: Path) -> list[str]:
    """Return the command that submits one attempt of a run as the job `name`."""
    job = spec.job
    warning_s = min(WARNING_S, job.time_s // 4) if job.time_s else WARNING_S
    options = {
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "time": f"{job.time_s // 60}:{job.time_s % 60:02d}" if job.time_s else "",
        "gres": job.gpus,
        "mem": f"{math.ceil(spec.memory_bytes / MIB)}M" if spec.memory_bytes else "",
        "cpus-per-task": str(math.ceil(spec.cpus)) if spec.cpus else "",
        **job.options,
    }
    return [
        *("sbatch", "--parsable", f"--job-name={name}", f"--comment=labctl:{spec.lab_id}"),
        *("--requeue", "--open-mode=append", f"--signal=B:TERM@{warning_s}", "--export=ALL"),
        f"--chdir={code}",
        f"--output={str(log).replace('%', '%%')}",
        *(f"--{option}={value}" for option, value in options.items() if value),
        str(script),
    ]


def parse_job_id(output: str) -> str:
    """Return the id that `sbatch --parsable` printed, "" if it printed none.

    With several clusters the cluster's name follows it.
    """
    job_id = output.strip().partition(";")[0]
    return job_id if job_id.isdigit() else ""


def build_queue_words(names: Sequence[str]) -> list[str]:
    """Return the command that lists jobs by name, also those that ended some minutes ago."""
    fields = ",".join(f"{field}:|" for field in _QUEUE_FIELDS)
    names_text = ",".join(names)
    return ["squeue", "--me", "-h", "-t", "all", "-n", names_text, "-O", fields]


def parse_queue(output: str) -> list[SlurmJob]:
    jobs = []
    for fields in _split_rows(output, len(_QUEUE_FIELDS)):
        job_id, name, state, reason, status, end, qos, account = fields
        exit_code, ended_at = _decode_status(status), _parse_time(end)
        jobs.append(SlurmJob(job_id, name, state, reason, exit_code, ended_at, qos, account))
    return jobs


def build_accounting_words(names: Sequence[str], since_s: float) -> list[str]:
    """Return the command that lists jobs by name in the accounting, of the last days."""
    since = time.strftime("%Y-%m-%d", time.gmtime(since_s - DAY_S))
    fields = ",".join(_ACCOUNTING_FIELDS)
    words = ["sacct", "-n", "-X", "-P", "--name", ",".join(names), "-S", since]
    return [*words, f"--format={fields}"]


def parse_accounting(output: str) -> list[SlurmJob]:
    jobs = []
    for job_id, name, state, status, ended_at in _split_rows(output, len(_ACCOUNTING_FIELDS)):
        code, _, number = status.partition(":")
        exit_code = int(code) if code.isdigit() else None
        if number.isdigit() and int(number):
            exit_code = 128 + int(number)
        state = state.split(" ")[0]  # "CANCELLED by 1000"
        jobs.append(SlurmJob(job_id, name, state, "", exit_code, _parse_time(ended_at)))
    return jobs


SHOW_CONFIG = ["scontrol", "show", "config"]


def has_accounting(config: str) -> bool:
    """Whether the cluster that has this configuration stores which jobs have ended."""
    pattern = r"^AccountingStorageType\s*=\s*(\S+)"
    match = re.search(pattern, config, re.MULTILINE)
    return match is not None and match.group(1) not in ("(null)", "accounting_storage/none")


def build_limits_words(job: SlurmJob, user: str) -> list[str]:
    """Return the command that shows the limits of a job's QOS, account and user, and their use."""
    selection = [f"users={user}", f"accounts={job.account}", f"qos={job.qos}"]
    return ["scontrol", "-o", "show", "assoc_mgr", *selection, "flags=qos,assoc"]


def parse_gpu_limit(output: str, job: SlurmJob, uid: int) -> GpuLimit | None:
    """Parse the limit on GPUs of a job whose reason is one of GPU_REASONS; None if not shown."""
    account = re.escape(job.account)
    pattern = {
        "AssocGrpGRES": rf"^ClusterName=.*?\bGrpTRES=[^ ]*?{_GPUS}",
        "MaxGRESPerAccount": rf"\bAccount Limits=.*?\b{account}={{[^}}]*?{_GPUS}",
        "QOSGrpGRES": rf"^QOS=.*?\bGrpTRES=[^ ]*?{_GPUS}",
        "QOSMaxGRESPerUser": rf"\bUser Limits=.*?\b{uid}={{[^}}]*?{_GPUS}",
    }[job.reason]
    match = re.search(pattern, output, re.MULTILINE)
    return GpuLimit(used=int(match.group(2)), limit=int(match.group(1))) if match else None


def build_cancel_words(job_id: str) -> list[str]:
    """Return the command that ends a job: a running one is killed after Slurm's own pause."""
    return ["scancel", job_id]


def build_signal_words(job_id: str, signal_name: str) -> list[str]:
    """Return the command that sends a signal to the script of a running job."""
    return ["scancel", f"--signal={signal_name}", "--batch", job_id]


def build_step_words(job_id: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one beside a job, in a terminal if there is one."""
    script = '[ ! -t 0 ] || set -- --pty "$@"; exec srun --quiet --overlap "$@"'
    return ["sh", "-c", script, "srun", f"--jobid={job_id}", *command]


def build_service_words(job_id: str, step: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one as a named step, on the first machine of a job."""
    return [*_ONE_TASK, f"--jobid={job_id}", f"--job-name={step}", *command]


def build_stream_words(job_id: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one whose standard streams carry any bytes.

    Without --unbuffered, Slurm passes output on line by line.
    """
    return [*_ONE_TASK, "--unbuffered", f"--jobid={job_id}", *command]


_ONE_TASK = ("srun", "--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--relative=0")
LIST_STEPS = ["squeue", "--me", "-s", "-h", "-o", "%i|%j"]


def parse_steps(output: str) -> list[SlurmStep]:
    """Parse what LIST_STEPS prints."""
    return [SlurmStep(*fields) for fields in _split_rows(output, 2)]


def _split_rows(output: str, count: int) -> list[list[str]]:
    rows = (line.split("|")[:count] for line in output.splitlines())
    return [[field.strip() for field in row] for row in rows if len(row) == count]


def _decode_status(text: str) -> int | None:
    """Decode what wait(2) gave for the job's script."""
    if not text.isdigit():
        return None
    status = int(text)
    return 128 + (status & 127) if status & 127 else status >> 8


def _parse_time(text: str) -> float | None:
    return float(text) if text.isdigit() else None

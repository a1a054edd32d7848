"""The jobs of Slurm in which containers run, on a server whose GPUs Slurm gives out.

A container is a part of the job whose process asked for it: it has the job's GPUs, its control
group is below that of the job, and it ends with the job. Slurm's prolog records a job on its
machine, and its epilog removes first the record, then the containers
(playbooks/roles/slurm/files).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..host.paths import read_text
from . import cgroup
from .detection import JOBS
from .gpu_leases import GpuIdentity
from .http import HttpRefusal
from .rules import ATTEMPT, JOB, AccountShare, BrokerAccount

OUTSIDE = (
    "on this server a container is a part of a job of Slurm, and this command is in none: "
    "start it with srun, for example `srun --pty bash`, or in a script for sbatch"
)
WITHOUT_JOB = (
    "this container is in no job of Slurm, and on this server it must be in one: "
    "make a new one in a job, for example in `srun --pty bash`"
)
NO_GPU = "this job of Slurm has no GPU: ask for one, for example with `srun --gres=gpu:1`"
DRIVER = Path("/proc/driver/nvidia/gpus")
# Both begin at the root: an account may make control groups of any name below its own.
CGROUPS = (
    re.compile(r"(?P<job>/slurm(_[\w.-]+)?/uid_[0-9]+/job_(?P<id>[0-9]+))(/.*)?"),
    re.compile(r"(?P<job>(/system\.slice)?/([\w.-]+_)?slurmstepd\.scope/job_(?P<id>[0-9]+))(/.*)?"),
)


class RunningJob(NamedTuple):
    """A job on this machine: the path of its control group, and the minor numbers of its GPUs.

    `attempt` is another word each time that Slurm starts the job; "" before labctl recorded it.
    """

    id: str
    uid: int
    cgroup: str = ""
    gpus: tuple[str, ...] = ()
    attempt: str = ""


def find_job(pid: int, account: BrokerAccount) -> RunningJob:
    """Return the running job of the account in which a process is. Refusal (403) without one.

    The number of a process that has ended may be that of another one by now. That gains nothing: a
    job of another account is refused here, and the account's own jobs are its own.
    """
    found = parse_cgroups(read_text(Path(f"/proc/{pid}/cgroup")))
    job = read_job(found[0]) if found else None
    if found is None or job is None or job.uid != account.uid:
        raise HttpRefusal(403, OUTSIDE)
    return job._replace(cgroup=found[1])


def parse_cgroups(text: str) -> tuple[str, str] | None:
    """Return a job's number and control group from the lines of /proc/PID/cgroup."""
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        for pattern in CGROUPS:
            if match := pattern.fullmatch(path):
                return match["id"], match["job"]
    return None


def read_job(job_id: str) -> RunningJob | None:
    """Return a job that runs on this machine; None if it does not.

    OSError if its record cannot be read.
    """
    try:
        text = (JOBS / job_id).read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    uid, gpus, attempt = [*text.rstrip("\n").split(" "), "", ""][:3]
    return RunningJob(
        job_id, int(uid), gpus=tuple(gpus.split(",")) if gpus else (), attempt=attempt
    )


def record_containers(job: RunningJob) -> None:
    """Have Slurm's epilog ask the Docker Engine for containers of the job."""
    (JOBS / f"{job.id}.containers").touch()


def list_labels(job: RunningJob) -> dict[str, str]:
    """Return the labels of a container that say which job it is a part of."""
    return {JOB: job.id, ATTEMPT: job.attempt}


def has_ended(labels: Mapping[str, str], uid: int, *, needs_job: bool) -> bool:
    """Tell whether a container of an account was part of a job that has ended.

    Also of one that Slurm has started again. With `needs_job`, a container without a job is from
    before Slurm gave out the GPUs, and ends, too.
    """
    if not labels.get(JOB):
        return needs_job
    job = read_job(labels[JOB])
    return job is None or job.uid != uid or job.attempt != labels.get(ATTEMPT, "")


def require_running(labels: Mapping[str, str], account: BrokerAccount, *, needs_job: bool) -> None:
    """Refuse (409) a container whose job has ended."""
    if has_ended(labels, account.uid, needs_job=needs_job):
        job_id = labels.get(JOB)
        message = f"job {job_id} of Slurm has ended, and its containers with it"
        raise HttpRefusal(409, message if job_id else WITHOUT_JOB)


def choose_gpus(job: RunningJob, wanted: list[str], gpus: list[GpuIdentity]) -> list[str]:
    """Return UUIDs for a container that requests `wanted`: UUIDs, numbers, or "*" for all.

    The job's GPUs are numbered from 0, as nvidia-smi and CUDA number them inside of it.
    """
    if not wanted:
        return []
    minors = read_minor_numbers()
    own = [gpu.uuid for gpu in gpus if minors.get(gpu.uuid, gpu.number) in job.gpus]
    if not own:
        raise HttpRefusal(409, NO_GPU)
    by_number = {str(number): uuid for number, uuid in enumerate(own)}
    chosen = [by_number.get(name, name) for name in (own if "*" in wanted else wanted)]
    if unknown := [name for name in chosen if name not in own]:
        names = f"the job has {', '.join(own)}, not {', '.join(unknown)[:200]}"
        raise HttpRefusal(403, f"a container can use only the GPUs of its job: {names}")
    return chosen


def read_minor_numbers(directory: Path = DRIVER) -> dict[str, str]:
    """Return the minor number of each GPU by its UUID, by the driver's own files.

    {} without them, and without MIG's parts: the numbers are then those of nvidia-smi.
    """
    numbers = {}
    for file in directory.glob("*/information"):
        rows = (line.partition(":") for line in read_text(file).splitlines())
        fields = {key.strip(): value.strip() for key, _, value in rows}
        if fields.get("GPU UUID") and fields.get("Device Minor"):
            numbers[fields["GPU UUID"]] = fields["Device Minor"]
    return numbers


def read_share(job: RunningJob, pids: int) -> AccountShare:
    """Return the memory and the processors that Slurm gave the job on this machine.

    Refusal (409) if its control group is gone: Slurm removes it with the job's last step.
    """
    return AccountShare(cgroup.read_memory_limit(job.cgroup), cgroup.count_cpus(job.cgroup), pids)


def set_job_limits(job: RunningJob, share: AccountShare, driver: str) -> str:
    """Return the CgroupParent of the job's containers. `driver` is the engine's cgroup driver.

    systemd does not manage Slurm's control groups: with it, the containers of a job have a slice of
    their own, with the same limits again. Slurm does not limit the number of processes.
    """
    record_containers(job)
    if driver == "systemd":
        cpus = cgroup.read_cpus(job.cgroup)
        return cgroup.set_slice(f"labctl-job{job.id}.slice", share, cpus)
    cgroup.limit_processes(job.cgroup, share.pids)
    return job.cgroup


def prepare_start(parent: str) -> dict[str, int]:
    """Prepare the CgroupParent of a container, the control group of its job or a slice of systemd.

    Refusal (409) if it is gone, as after the last step of an allocation that goes on: runc would
    make it again, without limits. Returns what `require_same_group` needs after the start.
    """
    if not parent.startswith("/"):
        return {}
    inodes = cgroup.read_inodes(parent)
    _allow_device_files(parent)
    return inodes


def require_same_group(parent: str, inodes: Mapping[str, int]) -> None:
    """Refuse (409) a container whose job's control group was removed while it started."""
    if inodes and not inodes.items() <= cgroup.read_inodes(parent).items():
        raise HttpRefusal(
            409, "the last step of the job of Slurm ended while the container started"
        )


def _allow_device_files(job_cgroup: str) -> None:
    """Let runc start a container in the job, with cgroup v1.

    runc adds a rule by which a container may make any device file. Slurm denies a job the other
    GPUs, and the kernel refuses a rule that grants what the parent denies. So the job gets the
    permission to make these files; it still cannot open them. Making one needs a capability that
    no account and no container has.
    """
    allowed = Path(f"{cgroup.ROOT}/devices{job_cgroup}/devices.allow")
    if not allowed.exists():
        return
    for node in Path("/dev").glob("nvidia[0-9]*"):
        status = node.stat()
        if stat.S_ISCHR(status.st_mode):
            number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            with suppress(OSError):  # the job has just ended
                allowed.write_text(f"c {number} m")

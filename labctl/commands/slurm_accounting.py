"""Slurm's accounting of a class: what it should be, what it is, and the commands between the two.

A course has one account and one QOS, both with the same name. Pure functions; nothing runs here.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence

import msgspec

from labctl.commands import slurm
from labctl.model import Value

# What sacctmgr takes for "no limit"
UNLIMITED = -1
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
_GPUS = "gres/gpu"
_FLAGS = "DenyOnLimit"
# jobs that one account can have in the queue, so that none fills it
MOST_JOBS = 100
_MIB = {"M": 1, "G": 1024, "T": 1024**2}
# Lines that tell the parts of a script's output apart
_QOS, _USERS, _USE, _NODES = "--- qos", "--- users", "--- use", "--- machines"
# The exit code of PROBE if one of Slurm's two daemons does not answer
NO_ANSWER = 75
PROBE = f"{{ sacctmgr -nP show cluster && squeue -h; }} >/dev/null || exit {NO_ANSWER}"
# times that a script looks whether canceled jobs have ended, five times a second
MOST_LOOKS = 150


class ClassLimits(Value, frozen=True):
    """The limits of a class: GPUs at once, minutes of GPUs in all, and seconds of each job.

    None has no limit.
    """

    gpus: int = 1
    gpu_minutes: int | None = None
    wall_s: int | None = None


class ClassQos(Value, frozen=True):
    """The limits that Slurm has for each account of a class. None has no limit.

    Processors and memory at once are the account's share of the machine, as its GPUs are.
    """

    gpus: int = 0
    wall_s: int | None = None
    cpus: int | None = None
    memory_mib: int | None = None
    jobs: int | None = None


class ClassMachines(Value, frozen=True):
    """What the machines of the cluster have in all. A job gets whole cores, of `threads` each."""

    cpus: int = 0
    memory_mib: int = 0
    gpus: int = 0
    threads: int = 1


class ClassUser(Value, frozen=True):
    """A user of the class's account. `used_minutes` are minutes of GPUs.

    A closed one can submit no jobs.
    """

    name: str
    qos: str = ""
    gpu_minutes: int | None = None
    used_minutes: int = 0
    is_closed: bool = False


class ClassAccounting(Value, frozen=True):
    """What Slurm has of a class. `qos` is None without its QOS, `users` without its account."""

    qos: ClassQos | None = None
    users: tuple[ClassUser, ...] | None = None
    machines: ClassMachines = ClassMachines()


def class_account(course: str) -> str:
    """Return the name of a course's account and QOS, which no account of Slurm itself has."""
    return f"course-{course}"


def build_query(account: str) -> str:
    """Return the script that prints what Slurm has of a class, for `parse_accounting`."""
    return (
        f"echo '{_QOS}' && sacctmgr -nP show qos {account} format=MaxTRESPU,MaxWall,MaxSubmitPU && "
        f"echo '{_USERS}' && sacctmgr -nP show assoc account={account} "
        f"format=User,QOS,GrpTRESMins,GrpSubmitJobs && "
        f"echo '{_USE}' && sshare -nP -a -A {account} -o User,GrpTRESRaw && "
        f"echo '{_NODES}' && sinfo -h -N -o '%n|%c|%m|%Z|%G' | sort -u"
    )


def parse_accounting(output: str) -> ClassAccounting:
    """Parse what the script of `build_query` prints."""
    parts: dict[str, list[list[str]]] = {_QOS: [], _USERS: [], _USE: [], _NODES: []}
    rows: list[list[str]] = []
    for line in output.splitlines():
        if line in parts:
            rows = parts[line]
        elif line.strip():
            rows.append(line.strip().split("|"))
    used = {row[0].strip(): parse_gpus(row[1]) or 0 for row in parts[_USE] if len(row) == 2}
    qos = [
        ClassQos(
            gpus=parse_gpus(tres) or 0,
            wall_s=_parse_time(wall),
            cpus=_parse_number(r"cpu=(\d+)", tres),
            memory_mib=_parse_memory(tres),
            jobs=int(jobs) if jobs.isdigit() else None,
        )
        for tres, wall, jobs in parts[_QOS]
    ]
    users = tuple(
        ClassUser(name, qos, parse_gpus(minutes), used.get(name, 0), most_jobs == "0")
        for name, qos, minutes, most_jobs in parts[_USERS]
        if name
    )
    return ClassAccounting(
        qos=qos[0] if qos else None,
        # The account itself has a row without a user.
        users=users if parts[_USERS] else None,
        machines=_parse_machines(parts[_NODES]),
    )


def build_changes(
    account: str,
    limits: ClassLimits,
    names: Iterable[str],
    present: ClassAccounting,
    ended: Iterable[str] = (),
) -> list[str]:
    """Return the commands that make Slurm's accounting what it should be; none if it is that.

    `names` are the users that the class should have. Others lose their association, and their jobs;
    what they have used stays recorded. `ended` are those of `names` whose accounts have ended: they
    keep an association that they have, and can submit no jobs.
    """
    commands: list[str] = []
    qos = compute_qos(limits, present.machines)
    settings = _list_qos_settings(qos)
    if present.qos is None:
        commands.append(_sacctmgr("add", "qos", account, *settings, f"Flags={_FLAGS}"))
    elif present.qos != qos:
        commands.append(_sacctmgr("modify", "qos", account, "set", *settings))
    if present.users is None:
        commands.append(_sacctmgr("add", "account", account, "Description=course"))
    users = {user.name: user for user in present.users or ()}
    wanted, closed = list(names), set(ended)
    minutes = UNLIMITED if limits.gpu_minutes is None else limits.gpu_minutes
    rules = [f"QOS={account}", f"DefaultQOS={account}", f"GrpTRESMins={_GPUS}={minutes}"]
    if new := [name for name in wanted if name not in users and name not in closed]:
        commands.append(_sacctmgr("add", "user", ",".join(new), f"Account={account}", *rules))
    right = (account, limits.gpu_minutes)
    if changed := [
        name
        for name in wanted
        if name in users and (users[name].qos, users[name].gpu_minutes) != right
    ]:
        where = [f"name={','.join(changed)}", f"account={account}"]
        commands.append(_sacctmgr("modify", "user", "where", *where, "set", *rules))
    present_closed = {name for name, user in users.items() if user.is_closed}
    if back := [name for name in wanted if name in present_closed - closed]:
        commands.append(_build_job_limit(account, back, UNLIMITED))
    if gone := [name for name in wanted if name in users and name in closed - present_closed]:
        commands.append(build_close(account, gone))
    if removed := sorted(users.keys() - set(wanted)):
        # Slurm refuses to remove a user with jobs.
        commands.append(build_close(account, removed))
        where = [f"name={','.join(removed)}", f"account={account}"]
        commands.append(_sacctmgr("delete", "user", "where", *where))
    return commands


def compute_qos(limits: ClassLimits, machines: ClassMachines) -> ClassQos:
    """Return the limits of each account. Without GPUs, nothing says how the machine is shared."""
    qos = ClassQos(limits.gpus, limits.wall_s, jobs=MOST_JOBS)
    if not machines.gpus:
        return qos
    share = min(1.0, limits.gpus / machines.gpus)
    cores = max(1, math.ceil(machines.cpus * share / machines.threads))
    memory_mib = math.ceil(machines.memory_mib * share)
    return msgspec.structs.replace(qos, cpus=cores * machines.threads, memory_mib=memory_mib)


def _list_qos_settings(qos: ClassQos) -> list[str]:
    cpus = UNLIMITED if qos.cpus is None else qos.cpus
    memory = UNLIMITED if qos.memory_mib is None else f"{qos.memory_mib}M"
    wall = UNLIMITED if qos.wall_s is None else qos.wall_s // MINUTE_S
    return [
        f"MaxTRESPerUser=cpu={cpus},mem={memory},{_GPUS}={qos.gpus}",
        f"MaxSubmitJobsPerUser={qos.jobs}",
        f"MaxWall={wall}",
    ]


def build_close(account: str, names: Sequence[str]) -> str:
    """Return the script that lets users submit no jobs, cancels those they have, and waits.

    It fails, and says why, if Slurm refuses one step, or if a job does not end.
    """
    cancels = [f"scancel -u {shlex.quote(name)} -A {account}" for name in names]
    users = shlex.quote(",".join(names))
    wait = (
        f"looks=0; while jobs=$(squeue -h -u {users} -A {account} -o '%i of %u') || exit 1; "
        f'[ -n "$jobs" ]; do [ "$looks" -lt {MOST_LOOKS} ] || '
        '{ echo "canceled jobs that have not ended: $jobs" >&2; exit 1; }; '
        "sleep 0.2; looks=$((looks + 1)); done"
    )
    steps = [_build_job_limit(account, names, 0), *cancels, f"{{ {wait}; }}"]
    return " && ".join(steps)


def _build_job_limit(account: str, names: Sequence[str], most: int) -> str:
    """The QOS has MaxSubmitJobs for each user, and would overrule that of the association."""
    where = [f"name={','.join(names)}", f"account={account}"]
    return _sacctmgr("modify", "user", "where", *where, "set", f"GrpSubmitJobs={most}")


def _sacctmgr(*words: str) -> str:
    return " ".join(shlex.quote(word) for word in ("sacctmgr", "-i", *words))


def parse_gpus(text: str) -> int | None:
    """Parse `cpu=4,gres/gpu=2`; None without a number of GPUs."""
    return _parse_number(rf"{_GPUS}=(\d+)", text)


def _parse_number(pattern: str, text: str) -> int | None:
    match = re.search(rf"(?:^|,){pattern}", text)
    return int(match.group(1)) if match else None


def _parse_memory(text: str) -> int | None:
    """Parse `mem=15000M` or `mem=16G` into MiB."""
    match = re.search(r"(?:^|,)mem=(\d+)([MGT])", text)
    return int(match.group(1)) * _MIB[match.group(2)] if match else None


def _parse_machines(rows: list[list[str]]) -> ClassMachines:
    """Parse what sinfo prints: name, processors, memory in MiB, threads of a core, and GPUs."""
    machines = ClassMachines()
    for _, cpus, memory, threads, gres in rows:
        machines = ClassMachines(
            machines.cpus + int(cpus),
            machines.memory_mib + int(memory),
            machines.gpus + slurm.parse_gpus(gres)[1],
            max(machines.threads, int(threads)),
        )
    return machines


def _parse_time(text: str) -> int | None:
    """Parse `1-02:00:00` into seconds; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * DAY_S + hours * HOUR_S + minutes * MINUTE_S + seconds

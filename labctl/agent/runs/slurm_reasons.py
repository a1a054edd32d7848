"""Slurm's codes in words for users: why a job waits, and how it ended."""

from __future__ import annotations

from .slurm_commands import GpuLimit

_NO_ROOM = "all the machines that fit are in use"
_GROUP = "your group already uses all that it may use at once"
_OWN = "you already use all that you may use at once"
_BUDGET = "the time that you or your group may use is spent; ask whoever runs the cluster"
_NODES = "machines that it needs are down or reserved"
_RESERVED = "the machines are, or will soon be, reserved for others; a shorter `time` may help"
_TOO_LONG = "it asks for more time than is allowed; set a shorter `time` and start it again"

# Codes of `squeue`'s field Reason (man squeue, "JOB REASON CODES").
_REASONS = {
    "None": "it was just submitted",
    "Resources": _NO_ROOM,
    "Priority": "other jobs are before it",
    "BeginTime": "Slurm starts it again in a moment",
    "Dependency": "it waits for another job",
    "JobHeldUser": "you hold it; `scontrol release` lets it start",
    "JobHeldAdmin": "whoever runs the cluster holds it",
    "Licenses": "all licenses that it needs are in use",
    "NodeDown": "a machine that it needs is down",
    "ReqNodeNotAvail": _NODES,
    "ReqNodeNotAvail, Reserved for maintenance": _RESERVED,
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs now",
    "PartitionNodeLimit": "it asks for more machines than its partition has",
    "PartitionTimeLimit": _TOO_LONG,
    "Reservation": "it waits for its reservation",
    "Cleaning": "Slurm cleans up after its last start",
    "InvalidAccount": "its account does not exist",
    "InvalidQOS": "its QOS does not exist",
    "BadConstraints": "no machine can satisfy what it asks for",
    "launch failed requeued held": "its start failed; whoever runs the cluster must release it",
    "JobLaunchFailure": "its start failed",
    "QOSMaxGRESPerUser": "you already use as many GPUs as you may use at once",
    "QOSMaxGRESMinutesPerJob": _TOO_LONG,
    "QOSMaxCpuPerUserLimit": "you already use as many CPUs as you may use at once",
    "QOSMaxMemoryPerUser": "you already use as much memory as you may use at once",
    "QOSMaxJobsPerUserLimit": "you already have as many running jobs as you may have",
    "QOSMaxWallDurationPerJobLimit": _TOO_LONG,
    "QOSGrpGRES": "your group already uses as many GPUs as it may use at once",
    "QOSGrpGRESMinutes": _BUDGET,
    "AssocGrpGRES": "your group already uses as many GPUs as it may use at once",
    "AssocGrpGRESMinutes": _BUDGET,
    "AssocGrpGRESRunMinutes": _BUDGET,
    "AssocGrpCPUMinutesLimit": _BUDGET,
    "AssocGrpCPURunMinutesLimit": _BUDGET,
    "AssocGrpJobsLimit": "your group already has as many running jobs as it may have",
    "AssocGrpCpuLimit": "your group already uses as many CPUs as it may use at once",
    "AssocGrpMemLimit": "your group already uses as much memory as it may use at once",
    "AssocMaxJobsLimit": "you already have as many running jobs as you may have",
    "AssocMaxWallDurationPerJobLimit": _TOO_LONG,
    "MaxGRESPerAccount": "your group already uses as many GPUs as it may use at once",
}
_OF_ONE_USER = ("QOSMaxGRESPerUser",)
# The rest of these families differs only in what is counted.
_FAMILIES = (
    ("AssocGrp", _GROUP),
    ("QOSGrp", _GROUP),
    ("MaxJobsPerAccount", _GROUP),
    ("ReqNodeNotAvail", _NODES),
    ("QOSMax", _OWN),
    ("AssocMax", _OWN),
)
_ENDINGS = {
    "BOOT_FAIL": "its machine did not start",
    "CANCELLED": "its job was canceled outside of labctl",
    "DEADLINE": "its job could not end before its deadline",
    "NODE_FAIL": "its machine failed",
    "PREEMPTED": "Slurm gave its place to another job",
    "REVOKED": "its job was moved to another cluster",
    "TIMEOUT": "it reached the time limit of its job",
}


_STOPS = {
    "time": "Slurm stopped it before the time limit of its job, and it had saved no checkpoint",
    "room": "Slurm stopped it to make room for another job, and it had saved no checkpoint",
}


def describe_reason(code: str, limit: GpuLimit | None = None) -> str:
    """Say why a job waits. Slurm's own code stays visible where labctl does not know it.

    `limit` is the limit on GPUs that keeps it waiting, if that is known.
    """
    if limit is not None:
        users = "you already use" if code in _OF_ONE_USER else "your group already uses"
        return f"waiting: {users} {limit.used} of {limit.limit} GPUs"
    if code in _REASONS:
        return f"waiting: {_REASONS[code]}"
    for prefix, words in _FAMILIES:
        if code.startswith(prefix):
            return f"waiting: {words} ({code})"
    return f"waiting: Slurm says {code}" if code else "waiting"


def describe_ending(state: str, stop_reason: str = "") -> str:
    """Say how Slurm ended a job; "" if its command ended by itself.

    `stop_reason` is why Slurm asked the command to end: "time", "room" or "".
    """
    return _ENDINGS.get(state) or _STOPS.get(stop_reason, "")

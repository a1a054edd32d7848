"""Scripts for a login node of Slurm: the file that claims it for a lab, and its partitions."""

from __future__ import annotations

import re
import shlex

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value
from labctl.text import count_text

CLAIMS = "labctl/.slurm"
# The exit code of a script whose question Slurm does not answer.
NO_ANSWER = 75
# The exit code of a script that finds the directory of labs elsewhere; its error is where.
OTHER_BASE = 76
# The exit code of a script for which the directory of labs is somebody else's; its error is whose.
FOREIGN_BASE = 77
VERSION = f"squeue --me -h >/dev/null || exit {NO_ANSWER}; squeue --version"
# Each line is one claim. A home that cannot be read now is not an empty one.
LIST_CLAIMS = (
    f"cd ~ && [ -r . ] || exit 1; cd {CLAIMS} 2>/dev/null || exit 0; "
    'for file in *.json; do [ ! -e "$file" ] || { cat "$file"; echo; }; done'
)
LIST_JOBS = f"squeue --me -h -o '%i|%T|%k' || exit {NO_ANSWER}"
# One line for each machine: its partition (the default one with a star), its state, CPUs, memory in
# MiB, what it has of each generic resource, and how much of that is in use
_FIELDS = ("Partition", "StateCompact", "CPUs", "Memory", "Gres", "GresUsed")
PARTITIONS = f"sinfo -h -N -O '{','.join(f'{field}:|' for field in _FIELDS)}'"
MIB = 1024**2
# times that a script looks whether canceled jobs have ended, five times a second
MOST_LOOKS = 150
USABLE_STATES = ("idle", "mix", "alloc")


# What labctl keeps for all labs of an account, beside their directories.
OWN_DIRECTORIES = [
    ".attempts",
    ".cache",
    ".environments",
    ".node-access",
    ".tools",
    ".used",
    ".wheelhouse",
]


class LabClaim(Value, frozen=True):
    """A lab that uses the login node (labctl/.slurm/TOKEN.json in the user's home there)."""

    token: str
    lab: str
    lab_id: str
    created_at: float
    partition: str = ""


class LabJob(Value, frozen=True):
    """A job of a lab, by its comment."""

    id: str
    state: str
    lab_id: str


class Partition(Value, frozen=True):
    """One partition: the largest machine that it has, and GPUs of all of its machines."""

    name: str
    is_default: bool = False
    machines: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    gpu_name: str = ""
    gpus: int = 0
    all_gpus: int = 0
    free_gpus: int = 0


def build_claim(claim: LabClaim, base: str = "") -> str:
    """Return the script that writes a claim, unless it exists, and prints it.

    With `base`, ~/labctl is a link to that directory. The script exits with OTHER_BASE if it is
    something else already, and with FOREIGN_BASE if another account owns the directory.
    """
    token, body = check_token(claim.token), shlex.quote(msgspec.json.encode(claim).decode())
    return (
        f"umask 077; {_build_link(base)}mkdir -p ~/{CLAIMS} && cd ~/{CLAIMS} && "
        f"{{ [ -e {token}.json ] || {{ printf '%s' {body} >{token}.new && "
        f"mv {token}.new {token}.json; }}; }} && cat {token}.json"
    )


def _build_link(base: str) -> str:
    """Return the lines that make ~/labctl a link to `base`, where ~ and $USER have their values."""
    if not base:
        return ""
    words = base.replace("~", "$HOME", 1) if base.startswith("~/") else base
    return (
        f'USER=$(id -un); base="{words}"; mkdir -p "$base" || exit 1; '
        # On a scratch file system, anybody can make a directory of this name first.
        f'[ -O "$base" ] || {{ stat -L -c %U "$base" >&2; exit {FOREIGN_BASE}; }}; '
        'chmod 700 "$base" || exit 1; '
        'if [ "$base" != ~/labctl ] && [ ! -e ~/labctl ]; then ln -sfn "$base" ~/labctl; fi; '
        'if [ "$(cd ~/labctl && pwd -P)" != "$(cd "$base" && pwd -P)" ]; then '
        f"(cd ~/labctl && pwd -P) >&2; exit {OTHER_BASE}; fi; "
    )


def build_release(claim: LabClaim) -> str:
    """Return the script that cancels the jobs of a lab, waits for their end, and drops its claim.

    It exits with NO_ANSWER, and the claim stays, if Slurm does not answer.
    """
    comment = shlex.quote(f"labctl:{claim.lab_id}")
    own = f"squeue --me -h -o '%i %k' | awk -v comment={comment} '$2 == comment {{ print $1 }}'"
    return (
        f"squeue --me -h >/dev/null || exit {NO_ANSWER}; "
        f'jobs=$({own}); [ -z "$jobs" ] || scancel $jobs; '
        f'looks=0; while [ -n "$({own})" ] && [ "$looks" -lt {MOST_LOOKS} ]; '
        "do sleep 0.2; looks=$((looks + 1)); done; "
        f"rm -f ~/{CLAIMS}/{check_token(claim.token)}.json"
    )


def build_removal(lab: str, lab_id: str) -> str:
    """Return the script that removes a lab's directory, and no directory of another lab.

    What labctl itself writes goes with the last lab.
    """
    names = " ".join(shlex.quote(name) for name in (lab, f"{lab}-{lab_id[:6]}"))
    own = shlex.quote(lab_id)
    return (
        f"cd ~/labctl 2>/dev/null || exit 0; for lab in {names}; do "
        f'[ "$(cat "$lab/.labctl/id" 2>/dev/null)" != {own} ] || rm -rf "./$lab"; done; '
        f"for attempt in .attempts/*/attempt.json; do "
        f'! grep -qs {own} "$attempt" || rm -rf "${{attempt%/*}}"; done; '
        "rmdir .slurm .attempts 2>/dev/null; "
        '[ ! -e .slurm ] && [ -z "$(ls -d */.labctl/id 2>/dev/null)" ] || exit 0; '
        f"rm -rf {' '.join(OWN_DIRECTORIES)}; base=$(pwd -P); cd ~; "
        '[ ! -L labctl ] || rm labctl; rmdir "$base" 2>/dev/null; true'
    )


def build_cancel(job_id: str) -> str:
    """Return the script that cancels a job; one that has ended is fine."""
    return f"squeue --me -h >/dev/null || exit {NO_ANSWER}; scancel {shlex.quote(job_id)}; true"


def parse_jobs(output: str) -> list[LabJob]:
    """Parse what LIST_JOBS prints, without ending jobs and those that are not of a lab."""
    jobs = []
    for line in output.splitlines():
        job_id, _, rest = line.partition("|")
        state, _, comment = rest.partition("|")
        lab_id = comment.removeprefix("labctl:")
        if job_id.isdigit() and lab_id != comment and state != "COMPLETING":
            jobs.append(LabJob(id=job_id, state=state, lab_id=lab_id))
    return jobs


def parse_claims(output: str) -> list[LabClaim]:
    """Parse the claims, one a line; what is not a claim is left out."""
    claims = []
    for line in output.splitlines():
        try:
            claims.append(decode_json(line, LabClaim))
        except msgspec.MsgspecError:
            continue
    return claims


def parse_partitions(output: str) -> list[Partition]:
    """Parse what PARTITIONS prints: one line for each machine of each partition.

    The default partition comes first.
    """
    partitions: dict[str, Partition] = {}
    for line in output.splitlines():
        fields = [field.strip() for field in line.split("|")][: len(_FIELDS)]
        if len(fields) < len(_FIELDS):
            continue
        marked_name, state, cpus, memory, gres, used = fields
        name = marked_name.rstrip("*")
        before = partitions.get(name, Partition(name=name))
        kind, count = parse_gpus(gres)
        is_usable = state.rstrip("*~#!%$@^-") in USABLE_STATES
        free = count - parse_gpus(used)[1] if is_usable else 0
        partitions[name] = Partition(
            name=name,
            is_default=marked_name != name,
            machines=before.machines + 1,
            cpus=max(before.cpus, _parse_int(cpus)),
            memory_bytes=max(before.memory_bytes, _parse_int(memory) * MIB),
            gpu_name=before.gpu_name or kind.upper(),
            gpus=max(before.gpus, count),
            all_gpus=before.all_gpus + count,
            free_gpus=before.free_gpus + free,
        )
    return sorted(partitions.values(), key=lambda partition: not partition.is_default)


def describe_free(partitions: list[Partition]) -> str:
    """Say what is free: `gpu: 3 of 4 GPUs free`."""
    texts = [
        f"{each.name}: {each.free_gpus} of {each.all_gpus} GPUs free"
        if each.all_gpus
        else f"{each.name}: {count_text(each.machines, 'machine')} without GPUs"
        for each in partitions
    ]
    return "; ".join(texts) or "no partition"


def check_token(token: str) -> str:
    """Return a token. ValueError for one that is not of hexadecimal digits."""
    if not re.fullmatch(r"[0-9a-f]{8,64}", token):
        raise ValueError(f"bad token {token!r}")
    return token


def parse_gpus(gres: str) -> tuple[str, int]:
    """Parse `gpu:a100:4(S:0-1)` or `gpu:2(IDX:0)` into the kind, "" without one, and the number."""
    kind, total = "", 0
    for match in re.finditer(r"\bgpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres):
        kind, total = kind or match.group(1) or "", total + int(match.group(2))
    return kind, total


def _parse_int(text: str) -> int:
    return int(text) if text.isdigit() else 0

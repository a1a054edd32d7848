"""Scripts for a login node of Slurm: the file that claims it for a lab, and its partitions."""

from __future__ import annotations

import re
import shlex

import msgspec

from labctl.model import Value

CLAIMS = "labctl/.slurm"
VERSION = "squeue --version && squeue --me -h >/dev/null"
# Each line is one claim.
LIST_CLAIMS = f'cd ~/{CLAIMS} 2>/dev/null && for file in *.json; do cat "$file"; echo; done'
# Partition, state of its machines, machines in that state, CPUs, memory (MB), GRES, used GRES
_FIELDS = ("PartitionName", "StateCompact", "Nodes", "CPUs", "Memory", "Gres", "GresUsed")
PARTITIONS = f"sinfo -h -N -O '{','.join(f'{field}:|' for field in _FIELDS)}'"
MIB = 1024**2
USABLE_STATES = ("idle", "mix", "alloc")


class LabClaim(Value, frozen=True):
    """A lab that uses the login node (labctl/.slurm/TOKEN.json in the user's home there)."""

    token: str
    lab: str
    lab_id: str
    created_at: float
    partition: str = ""


class Partition(Value, frozen=True):
    """One partition: the largest machine that it has, and GPUs of all of its machines."""

    name: str
    machines: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    gpu_name: str = ""
    gpus: int = 0
    all_gpus: int = 0
    free_gpus: int = 0


def build_claim(claim: LabClaim) -> str:
    """Return the script that writes a claim, unless it exists, and prints it."""
    token, body = check_token(claim.token), shlex.quote(msgspec.json.encode(claim).decode())
    return (
        f"umask 077; mkdir -p ~/{CLAIMS} && cd ~/{CLAIMS} && "
        f"{{ [ -e {token}.json ] || {{ printf '%s' {body} >{token}.new && "
        f"mv {token}.new {token}.json; }}; }} && cat {token}.json"
    )


def build_release(claim: LabClaim) -> str:
    """Return the script that cancels the jobs of a lab and removes its claim."""
    comment = shlex.quote(f"labctl:{claim.lab_id}")
    return (
        "squeue --me -h -o '%i %k' | while read -r job comment; do "
        f'[ "$comment" != {comment} ] || scancel "$job"; done; '
        f"rm -f ~/{CLAIMS}/{check_token(claim.token)}.json; "
        # What only labctl writes goes with the last lab.
        f"cd ~/labctl && rmdir ~/{CLAIMS} .attempts 2>/dev/null; "
        '[ "$(ls -A)" != .used ] || rm -rf ../labctl; true'
    )


def build_removal(lab: str, lab_id: str) -> str:
    """Return the script that removes a lab's directory, and no directory of another lab."""
    names = [shlex.quote(lab), shlex.quote(f"{lab}-{lab_id[:6]}")]
    return (
        f"cd ~/labctl && for lab in {' '.join(names)}; do "
        f'[ "$(cat "$lab/.labctl/id" 2>/dev/null)" != {shlex.quote(lab_id)} ] || '
        'rm -rf "./$lab"; done'
    )


def parse_claims(output: str) -> list[LabClaim]:
    """Parse the claims, one a line; what is not a claim is left out."""
    claims = []
    for line in output.splitlines():
        try:
            claims.append(msgspec.json.decode(line, type=LabClaim))
        except msgspec.MsgspecError:
            continue
    return claims


def parse_partitions(output: str) -> list[Partition]:
    """Parse what PARTITIONS prints: one line for each machine of each partition."""
    partitions: dict[str, Partition] = {}
    for line in output.splitlines():
        fields = [field.strip() for field in line.split("|")][: len(_FIELDS)]
        if len(fields) < len(_FIELDS):
            continue
        name, state, _, cpus, memory, gres, used = fields
        before = partitions.get(name, Partition(name=name))
        kind, count = _parse_gpus(gres)
        is_usable = state.rstrip("*~#!%$@^-") in USABLE_STATES
        free = count - _parse_gpus(used)[1] if is_usable else 0
        partitions[name] = Partition(
            name=name,
            machines=before.machines + 1,
            cpus=max(before.cpus, _parse_int(cpus)),
            memory_bytes=max(before.memory_bytes, _parse_int(memory) * MIB),
            gpu_name=before.gpu_name or kind.upper(),
            gpus=max(before.gpus, count),
            all_gpus=before.all_gpus + count,
            free_gpus=before.free_gpus + free,
        )
    return list(partitions.values())


def describe_free(partitions: list[Partition]) -> str:
    """Say what is free: `gpu: 3 of 4 GPUs free`."""
    texts = [
        f"{each.name}: {each.free_gpus} of {each.all_gpus} GPUs free"
        if each.all_gpus
        else f"{each.name}: {each.machines} machines without GPUs"
        for each in partitions
    ]
    return "; ".join(texts) or "no partition"


def check_token(token: str) -> str:
    """Return a token. ValueError for one that is not of hexadecimal digits."""
    if not re.fullmatch(r"[0-9a-f]{8,64}", token):
        raise ValueError(f"bad token {token!r}")
    return token


def _parse_gpus(gres: str) -> tuple[str, int]:
    """Parse `gpu:a100:4(S:0-1)` or `gpu:2(IDX:0)` into the kind, "" without one, and the number."""
    kind, total = "", 0
    for match in re.finditer(r"\bgpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres):
        kind, total = kind or match.group(1) or "", total + int(match.group(2))
    return kind, total


def _parse_int(text: str) -> int:
    return int(text) if text.isdigit() else 0

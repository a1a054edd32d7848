"""The machines of a cluster as its controller has them. Pure functions; nothing runs here."""

from __future__ import annotations

import re
import shlex

import msgspec

from labctl.model import Value

CONFIGURATION = "/etc/slurm/slurm.conf"
# Seconds for Slurm to answer. Without an answer, its states are unknown.
ANSWER_S = 20
_STATES = "--- states"
# Compact states of machines on which slurmd does not run. A `*` marks one that does not answer. A
# drained machine counts as joined: staff drained it on purpose.
_ABSENT = ("down", "unk", "fail")


class ClusterNodes(Value, frozen=True):
    """The machines by their names in Slurm: `configured` ones, and their states.

    `states` is empty if Slurm does not answer.
    """

    configured: frozenset[str] = frozenset()
    states: dict[str, str] = msgspec.field(default_factory=dict)

    def has_joined(self, hostname: str) -> bool:
        """Whether the machine runs jobs, or would if nobody had drained it."""
        state = self.states.get(hostname, "")
        if not state:
            return False
        return state.startswith(("drain", "drng")) or not (
            state.startswith(_ABSENT) or state.endswith("*")
        )


def build_query() -> str:
    """Return the script that prints the controller's machines, for `parse_nodes`."""
    names = f"sed -n 's/^NodeName=\\([^ ]*\\).*/\\1/p' {CONFIGURATION} 2>/dev/null"
    states = f"timeout {ANSWER_S} sinfo -h -N -o '%N|%t' 2>/dev/null"
    return f"{names}; echo '{_STATES}'; {states}; true"


def parse_nodes(output: str) -> ClusterNodes:
    """Parse what the script of `build_query` prints."""
    names, _, states = output.partition(_STATES)
    rows = re.findall(r"(?m)^(\S+)\|(\S+)$", states)
    return ClusterNodes(frozenset(names.split()), dict(rows))


def build_drain(hostname: str, reason: str) -> str:
    """Return the script that drains a machine, and prints how many jobs still run there."""
    name = shlex.quote(hostname)
    return (
        f"scontrol update nodename={name} state=drain reason={shlex.quote(reason)} && "
        f"squeue -h -w {name} -o %A | sort -u | wc -l"
    )

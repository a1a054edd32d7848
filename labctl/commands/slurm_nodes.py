"""The machines of a cluster as its controller has them. Pure functions; nothing runs here."""

from __future__ import annotations

import re
import shlex

import msgspec

from labctl.model import Value

CONFIGURATION = "/etc/slurm/slurm.conf"
# Seconds for sinfo. Without its answer, the states are unknown.
SINFO_TIMEOUT_S = 20
# Why labctl drains a node: staff have deleted its machine from `hosts`.
REMOVED_REASON = "removed from course.yaml"
_STATES = "--- states"
# Compact states of nodes on which slurmd does not run. A `*` marks one that does not answer.
_ABSENT = ("down", "unk", "fail")
# drained, and draining. Such a node counts as joined: it is known why it runs no jobs.
_DRAINED = ("drain", "drng")


class NodeState(Value, frozen=True):
    """The compact state of a node; if it runs no jobs, why, and who has set that."""

    name: str
    user: str = ""
    reason: str = ""

    @property
    def is_drained(self) -> bool:
        return self.name.startswith(_DRAINED)

    @property
    def is_absent(self) -> bool:
        """Whether slurmd does not run there, or does not answer."""
        return self.name.startswith(_ABSENT) or self.name.endswith("*")


class ClusterNodes(Value, frozen=True):
    """The nodes by their names in Slurm: `configured` ones, and their states.

    `states` is empty if Slurm does not answer.
    """

    configured: frozenset[str] = frozenset()
    states: dict[str, NodeState] = msgspec.field(default_factory=dict)

    def has_joined(self, hostname: str) -> bool:
        """Whether the node runs jobs, or would if nobody had drained it."""
        state = self.states.get(hostname)
        return state is not None and (state.is_drained or not state.is_absent)

    def is_removed(self, hostname: str) -> bool:
        """Whether labctl has drained the node, since its machine was deleted from `hosts`."""
        state = self.states.get(hostname)
        return state is not None and state.is_drained and state.reason == REMOVED_REASON

    @property
    def unavailable(self) -> dict[str, NodeState]:
        """The nodes that get no jobs."""
        return {
            name: state
            for name, state in sorted(self.states.items())
            # After a start of the controller, a node that runs jobs may not have answered yet.
            if state.is_drained or state.name.startswith(_ABSENT)
        }


def build_query() -> str:
    """Return the script that prints the controller's nodes, for `parse_nodes`."""
    names = f"sed -n 's/^NodeName=\\([^ ]*\\).*/\\1/p' {CONFIGURATION} 2>/dev/null"
    states = f"timeout {SINFO_TIMEOUT_S} sinfo -h -N -o '%N|%t|%u|%E' 2>/dev/null"
    return f"{names}; echo '{_STATES}'; {states}; true"


def parse_nodes(output: str) -> ClusterNodes:
    """Parse what the script of `build_query` prints."""
    names, _, states = output.partition(_STATES)
    rows = re.findall(r"(?m)^([^|\n]+)\|([^|\n]+)\|([^|\n]*)\|(.*)$", states)
    return ClusterNodes(
        frozenset(names.split()),
        {name: NodeState(state, user, reason) for name, state, user, reason in rows},
    )


def build_drain(hostname: str) -> str:
    """Return the script that drains a node, and prints how many jobs still run there."""
    name = shlex.quote(hostname)
    return (
        f"scontrol update nodename={name} state=drain reason={shlex.quote(REMOVED_REASON)} && "
        f"squeue -h -w {name} -o %A | sort -u | wc -l"
    )


def build_resume(hostname: str) -> str:
    """Return the script by which a drained node takes jobs again."""
    return f"scontrol update nodename={shlex.quote(hostname)} state=resume"

"""What a program on several servers learns about the others from its environment."""

from __future__ import annotations

from pathlib import Path

from ...wire.networks import WIREGUARD_PREFIX
from ...wire.runs import GangMember
from . import fast_network

# The bit of CAP_SYS_RESOURCE (capabilities(7)).
SYS_RESOURCE = 1 << 24


def build_member_env(member: GangMember | None) -> dict[str, str]:
    """Return the variables of one server's program; none for a run on one server.

    Without torchrun, there is one process on each server. torchrun reads its options from the
    variables that begin with PET_, and sets the others anew for each of its processes.
    """
    if member is None:
        return {}
    rank, size, port = str(member.rank), str(member.size), str(member.port)
    env = {
        **{"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": member.address, "MASTER_PORT": port},
        **{"PET_NODE_RANK": rank, "PET_NNODES": size},
        **{"PET_MASTER_ADDR": member.address, "PET_MASTER_PORT": port},
    }
    if member.interface:
        # Otherwise gloo uses the address of the host name, which is often 127.0.1.1. NCCL takes a
        # name without `=` as a prefix.
        env["GLOO_SOCKET_IFNAME"] = member.interface
        env["NCCL_SOCKET_IFNAME"] = f"={member.interface}"
    if uses_tunnel(member):
        # NCCL would prefer an adapter's RDMA, which no tunnel encrypts.
        return {**env, "NCCL_NET": "Socket"}
    return {**env, **fast_network.build_adapter_env()}


def uses_tunnel(member: GangMember) -> bool:
    """Whether the servers exchange data over WireGuard."""
    return member.interface.startswith(WIREGUARD_PREFIX)


def can_raise_limits() -> bool:
    """Whether the engine may raise limits of containers: not if this server is one itself."""
    for line in Path("/proc/1/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapBnd":
            return bool(int(value, 16) & SYS_RESOURCE)
    return False

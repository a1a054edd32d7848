"""Check which servers of a lab reach one another, by connections that their agents make."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from labctl.events import report_wait
from labctl.lifecycle import gang
from labctl.servers.context import LabContext
from labctl.wire.networks import CHECK_PEERS, CheckPeersRequest, NetworkAddress, PeerAddress


class ServerPair(NamedTuple):
    """A server, and another one that it is to reach, by their ranks."""

    source: int
    target: int


def find_unreached(
    members: Sequence[LabContext], addresses: Sequence[NetworkAddress], seconds: float
) -> list[ServerPair]:
    """Return the pairs of servers of which the first cannot reach the second at its address.

    `addresses` are in the order of the ranks. Takes at most `seconds`, and less if all are reached.
    """
    token = secrets.token_hex(16)
    listeners = [
        PeerAddress(rank, one.address, one.check_port) for rank, one in enumerate(addresses)
    ]

    def check(one: LabContext) -> tuple[int, ...]:
        own = listeners[one.rank or 0]
        others = tuple(each for each in listeners if each is not own)
        request = CheckPeersRequest(own, others, token, seconds)
        agent = one.open_agent(one.get_server())
        return agent.call(CHECK_PEERS, request, timeout_s=seconds + 60).reached

    with report_wait(members[0].reporter, "checking that the servers reach one another"):
        reached = gang.call_for_each(members, check)
    ranks = range(len(members))
    return [
        ServerPair(source, target)
        for source in ranks
        for target in ranks
        if target not in (source, *reached[source])
    ]


def describe_pairs(
    members: Sequence[LabContext], pairs: Sequence[ServerPair], addresses: Sequence[str]
) -> str:
    """Say who cannot reach whom, and at which address, a line for each pair."""
    names = [one.config.name for one in members]
    return "\n".join(
        f"{names[pair.source]} cannot reach {names[pair.target]} at {addresses[pair.target]}"
        for pair in pairs
    )

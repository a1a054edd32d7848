"""Choose the network over which the servers of a lab exchange data: private, or WireGuard.

A check decides, before each start of a run: servers, addresses and firewalls change.
"""

from __future__ import annotations

from collections.abc import Sequence

from labctl.errors import LabError, NoCommonNetworkError
from labctl.events import UniqueNote
from labctl.lifecycle import gang, gang_wireguard
from labctl.lifecycle.gang_peers import ServerPair, describe_pairs, find_unreached
from labctl.servers.context import LabContext
from labctl.wire.networks import FIND_ADDRESS, NetworkAddress
from labctl.wire.verbs import Empty

# Seconds within which the servers must reach one another, from the first call of their agents, in
# the first check and in the second: a busy server can take longer than the first.
CHECKS_S = (5.0, 20.0)


def connect(members: Sequence[LabContext]) -> list[NetworkAddress]:
    """Return an address of each server that all others reach, in the order of the ranks.

    NoCommonNetworkError says which servers cannot reach one another, and what to open.
    """
    network = members[0].config.server.network
    addresses = gang.call_for_each(members, find_address)
    if network == "wireguard":
        return gang_wireguard.connect(members, addresses, [])
    unreached: list[ServerPair] = []
    for seconds in CHECKS_S:
        unreached = find_unreached(members, addresses, seconds)
        if not unreached:
            return addresses
    found = describe_pairs(members, unreached, [f"{one.address} (TCP)" for one in addresses])
    if network == "private":
        raise NoCommonNetworkError(
            "the lab's servers cannot reach one another over their private addresses",
            why=found,
            hint=lambda subject: (
                "open all TCP ports between these addresses, or write `network: auto` under "
                f"`server` in {subject.config_file}"
            ),
        )
    note = UniqueNote(text="the servers have no private network in common; using WireGuard")
    members[0].reporter.emit(note)
    try:
        return gang_wireguard.connect(members, addresses, unreached)
    except LabError as error:
        error.why = f"{found}\n{error.why}"
        raise


def find_address(context: LabContext) -> NetworkAddress:
    """Return the server's address in its own network, and ports that are free there."""
    return context.open_agent(context.get_server()).call(FIND_ADDRESS, Empty())

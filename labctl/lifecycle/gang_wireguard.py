"""Connect the servers of a lab by WireGuard, where they have no private network in common.

Each server makes its own key pair. labctl collects the public keys and tells each server those of
the others, before every start of a run: so a replaced server's key reaches the others, and a
restarted one gets its interface back.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Network, ip_address
from typing import NamedTuple

from labctl.commands import ansible
from labctl.errors import LabError, NoCommonNetworkError
from labctl.events import Note, report_wait
from labctl.lifecycle import gang
from labctl.lifecycle.gang_peers import ServerPair, find_unreached
from labctl.model import Server, Value
from labctl.servers.context import LabContext
from labctl.servers.playbooks import run_playbook
from labctl.wire.networks import (
    CONNECT_WIREGUARD,
    INSPECT_WIREGUARD,
    REMOVE_WIREGUARD,
    WIREGUARD_PORTS,
    WIREGUARD_PREFIX,
    ConnectWireGuardRequest,
    InspectWireGuardReply,
    InspectWireGuardRequest,
    NetworkAddress,
    RemoveWireGuardRequest,
    WireGuardPeer,
)
from labctl.wire.verbs import Reply, Request, Verb

PLAYBOOK = "wireguard.yml"
# Kind of the ledger's line that a server got the interface.
CONNECTED = "wireguard"
# seconds within which the servers must reach one another through the tunnel; a handshake that gets
# no answer is repeated after five
CHECK_S = 12.0
# The keepalive that wg(8) recommends behind NAT, in seconds.
KEEPALIVE_S = 25
PREFIX_BITS = 24
PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
# A route to a larger network is a default route, whatever it is called.
LEAST_BITS = 8
# networks that are tried in each of PRIVATE_NETWORKS
CANDIDATES = 200


class PlaybookVariables(Value, frozen=True):
    wireguard_packages: tuple[str, ...]


class Tunnel(NamedTuple):
    """The WireGuard network of a lab: its name on every server, its addresses, its UDP port."""

    interface: str
    network: IPv4Network
    port: int

    def get_address(self, rank: int) -> str:
        return str(self.network[rank + 1])


class Site(NamedTuple):
    """A server with its public key, and the addresses at which others may reach it.

    `public_host` is the one at which this machine reaches it, "" if only this machine can use it.
    """

    public_key: str
    public_host: str
    private_host: str
    is_behind_nat: bool

    def list_hosts(self, *, prefers_private: bool) -> list[str]:
        hosts = [self.public_host, self.private_host]
        return list(dict.fromkeys(filter(None, reversed(hosts) if prefers_private else hosts)))


def connect(
    members: Sequence[LabContext],
    addresses: Sequence[NetworkAddress],
    unreached: Sequence[ServerPair],
) -> list[NetworkAddress]:
    """Connect the servers by WireGuard; return the address of each, in the order of their ranks.

    `addresses` are their private ones, and `unreached` the pairs that cannot use these. Safe to
    repeat. NoCommonNetworkError if the servers do not reach one another.
    """
    interface = make_interface_name(members[0].lab_id)
    for one in members:
        if not _has_been_connected(one):
            one.state.record(CONNECTED, lab_id=one.lab_id)
    replies = gang.call_for_each(members, partial(_prepare, interface=interface))
    tunnel = Tunnel(interface, choose_network(members[0].lab_id, replies), _choose_port(replies))
    sites = [
        _make_site(one, reply, address)
        for one, reply, address in zip(members, replies, addresses, strict=True)
    ]
    tried: dict[ServerPair, int] = dict.fromkeys(_list_pairs(len(members)), 0)
    hosts = {
        pair: sites[pair.target].list_hosts(prefers_private=pair not in unreached) for pair in tried
    }
    while True:
        chosen = {pair: _get_host(hosts[pair], number) for pair, number in tried.items()}
        found = _connect_all(members, tunnel, sites, chosen)
        failed = find_unreached(members, found, CHECK_S)
        if not failed:
            return found
        again = _find_others(failed, hosts, tried)
        if not again:
            raise _make_error(members, tunnel, sites, failed, hosts)
        for pair in again:
            tried[pair] += 1


def remove(context: LabContext, server: Server) -> None:
    """Remove the interface from a machine that lives on; a warning says if it stays.

    A lab that has one server now may have had several, as the ledger then says.
    """
    if context.rank is None and not _has_been_connected(context):
        return
    name = make_interface_name(context.group or context.lab_id)
    try:
        context.open_agent(server).call(REMOVE_WIREGUARD, RemoveWireGuardRequest(name))
    except LabError as error:
        text = f"a WireGuard interface of this lab may stay on {server.alias}, {name}: {error.what}"
        context.reporter.emit(Note(text=text, level="warning"))


def _has_been_connected(context: LabContext) -> bool:
    return bool(context.state.list_events(lab_id=context.lab_id, kind=CONNECTED, limit=1))


def make_interface_name(lab_id: str) -> str:
    """Return the interface's name, the same on all servers of a lab; Linux allows 15 characters."""
    return WIREGUARD_PREFIX + hashlib.sha256(lab_id.encode()).hexdigest()[:6]


def choose_network(lab_id: str, replies: Sequence[InspectWireGuardReply]) -> IPv4Network:
    """Return a network that no server has a route to, the same each time while that is so."""
    routes = [IPv4Network(route) for reply in replies for route in reply.routes]
    # A VPN for all traffic has routes to halves of the Internet: those are default routes.
    routes = [route for route in routes if route.prefixlen >= LEAST_BITS]
    for network in _list_networks(lab_id):
        if not any(network.overlaps(route) for route in routes):
            return network
    raise LabError(
        "WireGuard has no free network for the lab's servers",
        why=f"the servers have routes to all of {', '.join(PRIVATE_NETWORKS)}",
        hint="labctl ssh -- ip route   # shows them",
    )


def _list_networks(lab_id: str) -> Iterator[IPv4Network]:
    for text in PRIVATE_NETWORKS:
        whole = IPv4Network(text)
        count = 2 ** (PREFIX_BITS - whole.prefixlen)
        for number in range(CANDIDATES):
            digest = hashlib.sha256(f"{lab_id}:{number}".encode()).digest()
            position = int.from_bytes(digest[:4], "big") % count
            first = int(whole.network_address) + position * 2 ** (32 - PREFIX_BITS)
            yield IPv4Network((first, PREFIX_BITS))


def _choose_port(replies: Sequence[InspectWireGuardReply]) -> int:
    used = {port for reply in replies for port in reply.used_ports}
    for port in WIREGUARD_PORTS:
        if port not in used:
            return port
    ports = f"{WIREGUARD_PORTS[0]} to {WIREGUARD_PORTS[-1]}"
    raise LabError(
        "WireGuard has no free port on the lab's servers",
        why=f"other programs use the UDP ports {ports}",
        hint="labctl ssh -- ss -lun   # shows them",
    )


def _call(context: LabContext, verb: Verb[Request, Reply], request: Request) -> Reply:
    """Call a verb; an error names the server."""
    try:
        return context.open_agent(context.get_server()).call(verb, request)
    except LabError as error:
        error.what = f"{context.config.name}: {error.what}"
        raise


def _prepare(context: LabContext, interface: str) -> InspectWireGuardReply:
    """Install what WireGuard needs on the server, and return its public key and its routes."""
    request = InspectWireGuardRequest(interface)
    reply = _call(context, INSPECT_WIREGUARD, request)
    if not reply.missing_packages:
        return reply
    server = context.get_server()
    host = ansible.Host(
        alias=server.alias,
        ssh_config=context.connections.config_path(server.id),
        user=server.endpoint.user,
    )
    run_playbook(
        host,
        context.paths.data_dir / "playbooks",
        context.reporter,
        name=PLAYBOOK,
        variables=PlaybookVariables(wireguard_packages=reply.missing_packages),
        server_name=context.config.name,
    )
    return _call(context, INSPECT_WIREGUARD, request)


def _make_site(context: LabContext, reply: InspectWireGuardReply, address: NetworkAddress) -> Site:
    public_host = _resolve(context.get_server().endpoint.host)
    return Site(
        reply.public_key,
        public_host,
        address.address,
        is_behind_nat=public_host not in reply.addresses,
    )


def _resolve(host: str) -> str:
    """Return the IP address of a host, IPv4 if it has one; "" if it is this machine, or unknown."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            address = str(socket.getaddrinfo(host, None, family)[0][4][0])
            return "" if ip_address(address).is_loopback else address
    return ""


def _list_pairs(count: int) -> list[ServerPair]:
    ranks = range(count)
    return [ServerPair(source, target) for source in ranks for target in ranks if source != target]


def _get_host(hosts: Sequence[str], number: int) -> str:
    return hosts[min(number, len(hosts) - 1)] if hosts else ""


def _find_others(
    failed: Sequence[ServerPair], hosts: dict[ServerPair, list[str]], tried: dict[ServerPair, int]
) -> set[ServerPair]:
    """Return the pairs, among the failed ones and their reverse, with an address not tried yet."""
    both = {each for pair in failed for each in (pair, ServerPair(pair.target, pair.source))}
    return {pair for pair in both if tried[pair] + 1 < len(hosts[pair])}


def _connect_all(
    members: Sequence[LabContext],
    tunnel: Tunnel,
    sites: Sequence[Site],
    hosts: dict[ServerPair, str],
) -> list[NetworkAddress]:
    """Set up the interface on every server, with these addresses of the others."""

    def connect_one(one: LabContext) -> NetworkAddress:
        rank = one.rank or 0
        peers = tuple(
            WireGuardPeer(
                site.public_key,
                tunnel.get_address(peer),
                hosts[ServerPair(rank, peer)],
                KEEPALIVE_S if sites[rank].is_behind_nat else 0,
            )
            for peer, site in enumerate(sites)
            if peer != rank
        )
        request = ConnectWireGuardRequest(
            tunnel.interface, tunnel.get_address(rank), PREFIX_BITS, tunnel.port, peers
        )
        return _call(one, CONNECT_WIREGUARD, request)

    with report_wait(members[0].reporter, "connecting the servers by WireGuard"):
        return gang.call_for_each(members, connect_one)


def _make_error(
    members: Sequence[LabContext],
    tunnel: Tunnel,
    sites: Sequence[Site],
    failed: Sequence[ServerPair],
    hosts: dict[ServerPair, list[str]],
) -> NoCommonNetworkError:
    """Say which servers do not reach one another, and what filters their packets."""
    inspect = InspectWireGuardRequest(tunnel.interface)
    replies = gang.call_for_each(members, lambda one: _call(one, INSPECT_WIREGUARD, inspect))
    names = [one.config.name for one in members]
    lines, has_silent = [], False
    for pair in failed:
        who = f"{names[pair.source]} cannot reach {names[pair.target]} over WireGuard"
        if sites[pair.target].public_key in replies[pair.source].connected:
            lines.append(f"{who}: a firewall there filters the interface {tunnel.interface}")
            continue
        has_silent = True
        places = " and ".join(hosts[pair]) or "any address"
        lines.append(f"{who}: no answer at {places} (UDP port {tunnel.port})")
    rule = f"{tunnel.port}/udp" if has_silent else f"in on {tunnel.interface}"
    open_port = f"open UDP port {tunnel.port} of these servers for one another"
    return NoCommonNetworkError(
        "the lab's servers cannot reach one another",
        why="\n".join(lines),
        hint=f"{open_port if has_silent else 'admit the interface'}; with ufw, on each of them:\n"
        f"sudo ufw allow {rule}",
    )

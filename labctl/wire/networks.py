"""Messages about the network between the servers of a lab: addresses, a check, and WireGuard."""

from typing import NamedTuple, Tuple

from .verbs import Empty, Verb

# Every WireGuard interface of labctl has a name that begins so.
WIREGUARD_PREFIX = "labctl"
# The UDP ports that labctl uses for WireGuard: the first one that is free on all servers of a lab.
WIREGUARD_PORTS = range(51820, 51830)


class NetworkAddress(NamedTuple):
    """An address by which other servers may reach this one, and the interface that has it.

    The interface is "" if no interface has the address. `port` and `check_port` are TCP ports that
    are free on it now: for the run, and for a check.
    """

    address: str
    interface: str
    port: int
    check_port: int = 0


class PeerAddress(NamedTuple):
    """Where the server with this rank listens during a check."""

    rank: int
    address: str
    port: int


class CheckPeersRequest(NamedTuple):
    """Listen where `own` says, for at most `seconds`, and connect to every one of `peers`.

    A server counts as reached if it proves with `token`, which is new for each check, that it is
    the one with that rank: another network may have a machine with the same private address.
    """

    own: PeerAddress
    peers: Tuple[PeerAddress, ...]
    token: str
    seconds: float


class CheckPeersReply(NamedTuple):
    """The ranks of the servers that this one has reached."""

    reached: Tuple[int, ...]


class InspectWireGuardRequest(NamedTuple):
    interface: str


class InspectWireGuardReply(NamedTuple):
    """What the server has for WireGuard.

    `missing_packages` are those of Debian and Ubuntu that it lacks; without any, `public_key` is
    that of the key pair made here. `routes` are the networks (address/bits) that it has routes to,
    without those of `interface`, `addresses` its own, and `used_ports` those of WIREGUARD_PORTS
    that other programs use. `connected` are the public keys of the peers that have answered.
    """

    missing_packages: Tuple[str, ...]
    public_key: str = ""
    routes: Tuple[str, ...] = ()
    addresses: Tuple[str, ...] = ()
    used_ports: Tuple[int, ...] = ()
    connected: Tuple[str, ...] = ()


class WireGuardPeer(NamedTuple):
    """Another server. `address` is that inside the tunnel; `host` is "" if it is not known."""

    public_key: str
    address: str
    host: str
    keepalive_s: int = 0


class ConnectWireGuardRequest(NamedTuple):
    """Set up `interface` with `address` in a network of `prefix_bits`, and exactly these peers.

    All servers use the same UDP `port`.
    """

    interface: str
    address: str
    prefix_bits: int
    port: int
    peers: Tuple[WireGuardPeer, ...]


class RemoveWireGuardRequest(NamedTuple):
    interface: str


FIND_ADDRESS = Verb("address", Empty, NetworkAddress)
CHECK_PEERS = Verb("check-peers", CheckPeersRequest, CheckPeersReply)
INSPECT_WIREGUARD = Verb("wireguard", InspectWireGuardRequest, InspectWireGuardReply)
CONNECT_WIREGUARD = Verb("wireguard-connect", ConnectWireGuardRequest, NetworkAddress)
REMOVE_WIREGUARD = Verb("wireguard-remove", RemoveWireGuardRequest, Empty)

"""The address of this server by which other servers of its network reach it."""

from __future__ import annotations

import fcntl
import socket
import struct

from ...wire.networks import NetworkAddress
from ...wire.verbs import Empty

# The ioctl that returns an interface's IPv4 address (netdevice(7)).
SIOCGIFADDR = 0x8915
# An address for documentation (RFC 5737): no packet is sent to it.
ELSEWHERE = ("192.0.2.1", 9)


def find_address(request: Empty) -> NetworkAddress:
    """Return the address that the default route uses, and ports that are free on it now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        interfaces = _list_interfaces(probe)
        try:
            probe.connect(ELSEWHERE)
            address = probe.getsockname()[0]
        except OSError:  # no default route: the first interface that leads anywhere
            address = next(iter(interfaces), "127.0.0.1")
    return describe_address(address, interfaces.get(address, ""))


def describe_address(address: str, interface: str) -> NetworkAddress:
    """Return the address with ports that are free on it now."""
    with socket.socket() as first, socket.socket() as second:
        first.bind((address, 0))
        second.bind((address, 0))
        return NetworkAddress(address, interface, first.getsockname()[1], second.getsockname()[1])


def _list_interfaces(probe: socket.socket) -> dict[str, str]:
    """Return the names of the interfaces by their IPv4 addresses, without the loopback."""
    names = {}
    for _, name in socket.if_nameindex():
        try:
            reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # it has no IPv4 address
            continue
        names[socket.inet_ntoa(reply[20:24])] = name
    return {address: name for address, name in names.items() if not address.startswith("127.")}

"""What `ip -json` prints, as far as labctl reads it. Fields have iproute2's own names."""

from typing import NamedTuple, Tuple


class RouteMetrics(NamedTuple):
    mtu: int = 0


class IpRoute(NamedTuple):
    """A line of `ip route`; `dst` is "default", an address or a network."""

    dst: str = ""
    dev: str = ""
    metrics: Tuple[RouteMetrics, ...] = ()


class InterfaceAddress(NamedTuple):
    local: str = ""
    prefixlen: int = 0


class IpInterface(NamedTuple):
    addr_info: Tuple[InterfaceAddress, ...] = ()

"""WireGuard between the servers of a lab that have no private network.

The private key is made here, is readable by root alone, and never leaves the server. Peers get one
address each, nothing is forwarded, and no route but that of the tunnel's own network is added.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Iterator

from ...wire.codec import Message, from_json
from ...wire.networks import (
    CONNECT_WIREGUARD,
    INSPECT_WIREGUARD,
    REMOVE_WIREGUARD,
    WIREGUARD_PORTS,
    ConnectWireGuardRequest,
    InspectWireGuardReply,
    InspectWireGuardRequest,
    NetworkAddress,
    RemoveWireGuardRequest,
    WireGuardPeer,
)
from ...wire.verbs import Empty
from ..reply import Failure
from .addresses import describe_address
from .ip_objects import InterfaceAddress, IpInterface, IpRoute
from .sudo import call_as_root, can_sudo

KEYS = Path("/var/lib/labctl/wireguard")
TUN = Path("/dev/net/tun")
# The MTU that wg-quick chooses on Ethernet, and what WireGuard adds to a packet over IPv6.
MOST_MTU, OVERHEAD_BYTES = 1420, 80
PUBLIC_KEY = re.compile("[A-Za-z0-9+/]{43}=")
# seconds for which a handshake proves that the peer is connected
HANDSHAKE_S = 180


def inspect(request: InspectWireGuardRequest) -> InspectWireGuardReply:
    """Return what the server has for WireGuard, and make its key pair once it has everything."""
    if os.geteuid() != 0:
        _require_sudo()
        return call_as_root(INSPECT_WIREGUARD, request)
    _extend_path()
    name = request.interface
    missing = [] if shutil.which("wg") else ["wireguard-tools"]
    if not shutil.which("ip"):
        missing.append("iproute2")
    if not (_has_interface(name) or shutil.which("wireguard-go") or _has_kernel_module()):
        missing.append("wireguard-go")
    if missing:
        return InspectWireGuardReply(tuple(missing))
    return InspectWireGuardReply(
        (),
        public_key=_run("wg", "pubkey", stdin=_read_key(name)).strip(),
        routes=tuple(sorted(set(_list_routes(name)))),
        addresses=tuple(sorted(set(_list_addresses()))),
        used_ports=tuple(_list_used_ports(name)),
        connected=tuple(_list_connected(name)),
    )


def connect(request: ConnectWireGuardRequest) -> NetworkAddress:
    """Set up the interface with exactly these peers. Safe to repeat, and to change."""
    if os.geteuid() != 0:
        _require_sudo()
        return call_as_root(CONNECT_WIREGUARD, request)
    _extend_path()
    name = request.interface
    if not _has_interface(name):
        _create_interface(name)
    # Peers that the file does not name are removed; sessions with the others stay.
    config = _build_config(request, _read_key(name))
    _run("wg", "syncconf", name, "/dev/stdin", stdin=config)
    _set_address(name, request.address, request.prefix_bits)
    # An engine of containers may have enabled forwarding: a peer must not reach other networks so.
    with suppress(OSError):  # a container whose /proc/sys is read-only
        Path("/proc/sys/net/ipv4/conf", name, "forwarding").write_text("0")
    _run("ip", "link", "set", name, "mtu", str(_find_mtu(request.peers)), "up")
    return describe_address(request.address, name)


def remove(request: RemoveWireGuardRequest) -> Empty:
    """Remove the interface and its key, if the server has them."""
    name = request.interface
    if not (_has_interface(name) or KEYS.is_dir()):
        return Empty()
    if os.geteuid() != 0:
        return call_as_root(REMOVE_WIREGUARD, request)
    _extend_path()
    if _has_interface(name):
        _run("ip", "link", "delete", name)  # wireguard-go ends with its interface
    for file in (KEYS / name, *KEYS.glob(f".{name}.*")):  # also of a call that was killed
        with suppress(FileNotFoundError):
            file.unlink()
    with suppress(OSError):  # another lab's keys are in it
        KEYS.rmdir()
    return Empty()


def _require_sudo() -> None:
    if not can_sudo():
        user = os.environ.get("USER") or str(os.getuid())
        what = "WireGuard needs root, or sudo without a password"
        why = f"the account {user} has neither on this server"
        next_step = "connect the servers by a private network, or allow sudo there"
        raise Failure("policy", what, why, next_step)


def _extend_path() -> None:
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


def _run(*words: str, stdin: str = "") -> str:
    """Run a command and return its output. Failure (server) with its error output if it fails."""
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Failure("server", f"WireGuard needs {words[0]}, which is missing here") from None
    if done.returncode != 0:
        what = f"WireGuard could not be set up: {words[0]} failed"
        why = f"{' '.join(words)}: {done.stderr.strip()[-1000:]}"
        raise Failure("server", what, why, "labctl doctor")
    return done.stdout


def _succeeds(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _has_interface(name: str) -> bool:
    return Path("/sys/class/net", name).exists()


def _has_kernel_module() -> bool:
    """Try whether the kernel makes such an interface, by one that nobody else uses."""
    name = f"labctltest{os.getpid() % 100000}"
    return _add_kernel_interface(name) and _succeeds("ip", "link", "delete", name)


def _add_kernel_interface(name: str) -> bool:
    return _succeeds("ip", "link", "add", name, "type", "wireguard")


def _create_interface(name: str) -> None:
    """Create the interface by the kernel's module, or by wireguard-go without it."""
    if _add_kernel_interface(name) or _has_interface(name):  # another call may have made it
        return
    if not TUN.exists():
        _succeeds("modprobe", "tun")
    if not TUN.exists():
        TUN.parent.mkdir(mode=0o755, exist_ok=True)
        try:
            os.mknod(TUN, 0o600 | stat.S_IFCHR, os.makedev(10, 200))
        except OSError as error:
            what = "this server allows no tunnel: it has no /dev/net/tun"
            raise Failure("server", what, str(error)) from None
    _run("wireguard-go", name)


def _read_key(name: str) -> str:
    """Return the private key of the interface, which is made on the first call."""
    KEYS.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = KEYS / name
    if not file.exists():
        # Only root can read it: so NamedTemporaryFile makes its files.
        with tempfile.NamedTemporaryFile("w", dir=str(KEYS), prefix=f".{name}.") as new:
            new.write(_run("wg", "genkey"))
            new.flush()
            os.fsync(new.fileno())
            with suppress(FileExistsError):  # another call was faster
                os.link(new.name, file)
    return file.read_text()


def _build_config(request: ConnectWireGuardRequest, key: str) -> str:
    """Return the configuration file (wg(8)) that names the peers, with one address for each."""
    lines = ["[Interface]", f"PrivateKey = {key.strip()}", f"ListenPort = {request.port}"]
    for peer in request.peers:
        _require_plain(peer)
        lines += ["[Peer]", f"PublicKey = {peer.public_key}", f"AllowedIPs = {peer.address}/32"]
        if peer.host:
            host = f"[{peer.host}]" if ":" in peer.host else peer.host
            lines.append(f"Endpoint = {host}:{request.port}")
        lines.append(f"PersistentKeepalive = {peer.keepalive_s or 'off'}")
    return "\n".join(lines) + "\n"


def _require_plain(peer: WireGuardPeer) -> None:
    """Failure if the peer's server sent anything else than a key and addresses."""
    try:
        ipaddress.ip_address(peer.address)
        if peer.host:
            ipaddress.ip_address(peer.host)
    except ValueError as error:
        raise Failure("policy", "another server sent an invalid address", str(error)) from None
    if not PUBLIC_KEY.fullmatch(peer.public_key):
        raise Failure("policy", "another server sent an invalid WireGuard key")


def _read_ip(kind: type[Message], *words: str) -> list[Message]:
    """Return what iproute2 prints as JSON, which is nothing at all for an empty list."""
    lines = json.loads(_run("ip", "-json", *words).strip() or "[]")
    return [from_json(kind, line) for line in lines]


def _list_routes(but: str) -> Iterator[str]:
    """Yield the networks that the server has routes to, in every table, but not the default."""
    for route in _read_ip(IpRoute, "-4", "route", "show", "table", "all"):
        if route.dev != but:
            with suppress(ValueError):
                yield str(ipaddress.ip_network(route.dst))


def _list_addresses() -> Iterator[str]:
    for interface in _read_ip(IpInterface, "address", "show"):
        yield from (one.local for one in interface.addr_info if one.local)


def _set_address(name: str, address: str, prefix_bits: int) -> None:
    """Give the interface this address, and no other one."""
    wanted = InterfaceAddress(address, prefix_bits)
    interfaces = _read_ip(IpInterface, "-4", "address", "show", "dev", name)
    if [one for interface in interfaces for one in interface.addr_info] != [wanted]:
        _run("ip", "address", "flush", "dev", name)
        _run("ip", "address", "add", f"{address}/{prefix_bits}", "dev", name)


def _list_used_ports(name: str) -> Iterator[int]:
    """Yield those of WIREGUARD_PORTS that cannot be used, but not the interface's own port."""
    own = _run("wg", "show", name, "listen-port").strip() if _has_interface(name) else ""
    for port in WIREGUARD_PORTS:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and str(port) != own:
                    yield port


def _list_connected(name: str) -> Iterator[str]:
    if not _has_interface(name):
        return
    for line in _run("wg", "show", name, "latest-handshakes").splitlines():
        key, _, at = line.partition("\t")
        if time.time() - int(at or 0) < HANDSHAKE_S:
            yield key


def _find_mtu(peers: tuple[WireGuardPeer, ...]) -> int:
    """Return the MTU inside the tunnel: what the routes to the peers leave, MOST_MTU at most."""
    found = [MOST_MTU]
    for peer in peers:
        if peer.host:
            with suppress(Failure, OSError):
                for route in _read_ip(IpRoute, "route", "get", peer.host):
                    metrics = [each.mtu for each in route.metrics if each.mtu]
                    device = int(Path("/sys/class/net", route.dev, "mtu").read_text())
                    found.append(min([device, *metrics]) - OVERHEAD_BYTES)
    return min(found)

"""The port of a service on the server's loopback: its usual one if that is free there.

So `ssh -L 6006:localhost:6006` finds TensorBoard, as people know it from other servers.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from ..host import engine
from ..host.engine_objects import NewContainer, PortBinding

# the state of a listening socket in /proc/net/tcp
_LISTENS = "0A"
_LOOPBACK = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"
_IPV4_PREFIX = f"{'0' * 16}{int.from_bytes(bytes(2) + bytes([255, 255]), sys.byteorder):08X}"
# its addresses that accept a connection to the loopback: 127.0.0.1, 0.0.0.0, and both as IPv6
_ADDRESSES = {_LOOPBACK, "0" * 8, _IPV4_PREFIX + _LOOPBACK, "0" * 32}


def create_and_start(name: str, body: NewContainer, port: int) -> None:
    """Start a service's container, published at `port` if that is free, else at any free port.

    EngineRequestError if the engine refuses; then no container is left.
    """
    if is_free(port):
        try:
            _start(name, _publish_at(body, port))
            return
        except engine.EngineRequestError:
            # Perhaps another program has taken the port meanwhile, or the engine had promised it to
            # another container. If the reason is another one, the second attempt reports it.
            pass
    _start(name, body)


def is_free(port: int) -> bool:
    """Return whether this account can listen on a port of the loopback, and nobody else does."""
    with socket.socket() as probe:
        # Without this, connections of an ended program would block its port for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def is_own_listener(port: int) -> bool:
    """Return whether only this account listens on a port of the loopback.

    Another account of the machine may have taken the port after it was free.
    """
    owners = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            # https://docs.kernel.org/networking/proc_net_tcp.html: addresses are hexadecimal.
            _, local, _, state, _, _, _, uid = row.split()[:8]
            address, _, number = local.rpartition(":")
            if state == _LISTENS and address in _ADDRESSES and int(number, 16) == port:
                owners.add(int(uid))
    return owners == {os.getuid()}


def find_free_port() -> int:
    """Return a port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _publish_at(body: NewContainer, port: int) -> NewContainer:
    binding = PortBinding(HostIp="127.0.0.1", HostPort=str(port))
    config = body.HostConfig._replace(PortBindings={f"{port}/tcp": (binding,)})
    return body._replace(HostConfig=config)


def _start(name: str, body: NewContainer) -> None:
    try:
        if not engine.create_container(name, body):
            raise engine.EngineRequestError(409, f"a container named {name} already exists")
        engine.start_container(name)
    except engine.EngineRequestError:
        engine.remove_container(name)
        raise

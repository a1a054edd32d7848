"""The port of a service on the server's loopback: its usual one if that is free there.

So `ssh -L 6006:localhost:6006` finds TensorBoard, as people know it from other servers.
"""

from __future__ import annotations

import socket

from ..host import engine
from ..host.engine_objects import NewContainer, PortBinding


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

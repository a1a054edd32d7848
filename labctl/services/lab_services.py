"""The services of a lab and the forwards to them, by the settings of its lab.yaml."""

from __future__ import annotations

import sys
from collections.abc import Callable

from labctl.config import KNOWN_SERVICE_PORTS, parse_port
from labctl.errors import UsageError
from labctl.model import Forward, Server, Service
from labctl.runs import images
from labctl.servers.context import Ground
from labctl.servers.prepare import gpu_for
from labctl.services import services
from labctl.services.forwards import (
    DetachedSpec,
    Forwarding,
    ForwardSpec,
    list_forwards,
    run_detached,
    stop_forward,
)
from labctl.sync import lab_files


def forward(ground: Ground, server: Server, name: str, port: int) -> Forwarding:
    """An open forward to a service that runs; it comes back by itself after a cut."""
    wanted = _request(ground, server, name)
    service = _ensure(ground, server, wanted)
    return open_forward(ground, server, service, port, lambda now: _ensure(ground, now, wanted))


def forward_detached(ground: Ground, service_name: str, port: int) -> Forward:
    """A forward that goes on when this process ends."""
    server = ground.server()
    wanted = _request(ground, server, service_name)
    return detach_forward(ground, server, _ensure(ground, server, wanted), wanted, port)


def _request(ground: Ground, server: Server, name: str) -> services.ServiceRequest:
    """A service by name: TensorBoard, Jupyter, one of lab.yaml's, or a port of the server."""
    config = ground.config
    own = config.services.get(name)
    port = own.port if own else 0
    if own is None and name not in KNOWN_SERVICE_PORTS:
        try:
            port = parse_port(name)
        except ValueError:
            known = ", ".join(dict.fromkeys([*KNOWN_SERVICE_PORTS, *config.services]))
            raise UsageError(
                f"there is no service called {name!r}",
                why=f"known: {known}, and any port number of the server",
                hint="add it to services: in lab.yaml",
            ) from None
    return services.ServiceRequest(
        lab=config.name,
        lab_id=ground.lab_id,
        name=name,
        image=images.reference(ground),
        command=own.command if own else (),
        port=port,
        gpus=gpu_for(config.server.need, ground.facts(server), None),
        args=images.build_args(ground, config.image),
        wheelhouse=bool(config.wheelhouse),
    )


def _ensure(ground: Ground, server: Server, wanted: services.ServiceRequest) -> Service:
    remote = ground.remote(server)

    def provide() -> None:
        lab_files.push(ground, server, force=False)
        images.ensure(ground, server, remote, wanted.image)

    return services.ensure_service(
        remote,
        wanted,
        ground.reporter,
        provide_image=provide,
        provide_wheels=lambda: images.push_wheelhouse(ground, server, remote),
    )


def open_forward(
    ground: Ground,
    server: Server,
    service: Service,
    port: int,
    restart: Callable[[Server], Service],
) -> Forwarding:
    """A local port that leads to `service` while this process lives.

    `restart` has the service run again after a cut, on the server as its provider then knows it.
    """

    def reopen() -> Service:
        from labctl.servers.adoption import adopt

        now = adopt(ground) or server
        ground.connections.write(now)
        return restart(now)

    spec = _forward_spec(ground, server, service, port)
    return Forwarding(spec, ground.reporter, reopen).open()


def detach_forward(
    ground: Ground, server: Server, service: Service, request: services.ServiceRequest, port: int
) -> Forward:
    """The same in a process of its own, which goes on when this one ends."""
    lab = str(ground.config.root)
    spec = DetachedSpec(
        forward=_forward_spec(ground, server, service, port),
        log_path=str(ground.paths.log_dir / f"forward-{server.id}-{service.name}.log"),
        request=request,
        refresh_argv=(sys.executable, "-m", "labctl", "-C", lab, "status", "--refresh", "--json"),
    )
    return run_detached(spec, ground.state)


def _forward_spec(ground: Ground, server: Server, service: Service, port: int) -> ForwardSpec:
    return ForwardSpec(
        config=str(ground.connections.write(server)),
        server_id=server.id,
        endpoint=server.endpoint,
        service=service,
        local_port=port,
    )


def stop_services(ground: Ground, server: Server) -> None:
    services.stop_service(ground.remote(server), ground.config.name, ground.lab_id)


def remove_containers(ground: Ground, server: Server) -> None:
    """Leave no container of ours behind on a server that others may get next."""
    stop_services(ground, server)
    remote = ground.remote(server)
    remote.call("clear", {"lab": ground.config.name, "lab_id": ground.lab_id})


def stop_forwards(ground: Ground, server: Server) -> None:
    """End what leads to a server that is about to go."""
    for one in list_forwards(ground.state, server.id):
        stop_forward(ground.state, one.id, server.id)

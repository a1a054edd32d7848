"""Services and forwards of a lab, with the settings of its lab.yaml."""

from __future__ import annotations

import sys
from collections.abc import Callable

from labctl.config import KNOWN_SERVICE_PORTS, parse_port
from labctl.errors import UsageError
from labctl.model import Forward, Server, Service
from labctl.runs import images
from labctl.servers.context import LabContext
from labctl.servers.prepare import select_gpus
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


def forward(ground: LabContext, server: Server, name: str, port: int) -> Forwarding:
    """Start a service and open a forward to it, which reconnects after a lost connection."""
    wanted = _build_request(ground, server, name)
    service = _ensure(ground, server, wanted)
    return open_forward(ground, server, service, port, lambda now: _ensure(ground, now, wanted))


def forward_detached(ground: LabContext, service_name: str, port: int) -> Forward:
    """Start a service and a background forward to it, which outlives this process."""
    server = ground.get_server()
    wanted = _build_request(ground, server, service_name)
    return detach_forward(ground, server, _ensure(ground, server, wanted), wanted, port)


def _build_request(ground: LabContext, server: Server, name: str) -> services.ServiceRequest:
    """Build the request for TensorBoard, Jupyter, a service of lab.yaml, or a port number."""
    config = ground.config
    own = config.services.get(name)
    port = own.port if own else 0
    if own is None and name not in KNOWN_SERVICE_PORTS:
        try:
            port = parse_port(name)
        except ValueError:
            known = ", ".join(dict.fromkeys([*KNOWN_SERVICE_PORTS, *config.services]))
            raise UsageError(
                f"unknown service {name!r}",
                why=f"available: {known}, or any port number of the server",
                hint="add it to services: in lab.yaml",
            ) from None
    return services.ServiceRequest(
        lab=config.name,
        lab_id=ground.lab_id,
        name=name,
        image=images.image_reference(ground),
        command=own.command if own else (),
        port=port,
        gpus=select_gpus(config.server.need, ground.load_facts(server), None),
        args=images.build_args(ground, config.image),
        wheelhouse=bool(config.wheelhouse),
    )


def _ensure(ground: LabContext, server: Server, wanted: services.ServiceRequest) -> Service:
    remote = ground.open_agent(server)

    def provide() -> None:
        lab_files.push(ground, server, force=False)
        images.ensure_image(ground, server, remote, wanted.image)

    return services.ensure_service(
        remote,
        wanted,
        ground.reporter,
        provide_image=provide,
        provide_wheels=lambda: images.push_wheelhouse(ground, server, remote),
    )


def open_forward(
    ground: LabContext,
    server: Server,
    service: Service,
    port: int,
    restart: Callable[[Server], Service],
) -> Forwarding:
    """Open a local port to `service` while this process runs.

    `restart` restarts the service after a lost connection, on the server's current address.
    """

    def reopen() -> Service:
        from labctl.servers.adoption import adopt

        now = adopt(ground) or server
        ground.connections.write(now)
        return restart(now)

    spec = _forward_spec(ground, server, service, port)
    return Forwarding(spec, ground.reporter, reopen).open()


def detach_forward(
    ground: LabContext,
    server: Server,
    service: Service,
    request: services.ServiceRequest,
    port: int,
) -> Forward:
    """Open a local port to `service` in a background process, which outlives this one."""
    lab = str(ground.config.root)
    spec = DetachedSpec(
        forward=_forward_spec(ground, server, service, port),
        log_path=str(ground.paths.log_dir / f"forward-{server.id}-{service.name}.log"),
        request=request,
        refresh_argv=(sys.executable, "-m", "labctl", "-C", lab, "status", "--refresh", "--json"),
    )
    return run_detached(spec, ground.state)


def _forward_spec(ground: LabContext, server: Server, service: Service, port: int) -> ForwardSpec:
    return ForwardSpec(
        config=str(ground.connections.write(server)),
        server_id=server.id,
        endpoint=server.endpoint,
        service=service,
        local_port=port,
    )


def stop_services(ground: LabContext, server: Server) -> None:
    """Stop all services of the lab on the server."""
    services.stop_service(ground.open_agent(server), ground.config.name, ground.lab_id)


def remove_containers(ground: LabContext, server: Server) -> None:
    """Remove all containers of the lab from a server that other users may get next."""
    stop_services(ground, server)
    remote = ground.open_agent(server)
    remote.call("clear", {"lab": ground.config.name, "lab_id": ground.lab_id})


def stop_forwards(ground: LabContext, server: Server) -> None:
    """Stop all background forwards to a server that is about to be removed."""
    for background in list_forwards(ground.state, server.id):
        stop_forward(ground.state, background.id, server.id)

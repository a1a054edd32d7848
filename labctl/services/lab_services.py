"""Services and forwards of a lab, with the settings of its lab.yaml."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Sequence

from labctl.config import KNOWN_SERVICE_PORTS, LabConfig, parse_port
from labctl.config.reader import find_nearest
from labctl.errors import ConnectError, UsageError
from labctl.events import SharedProgress, report_lock_wait
from labctl.model import Forward, Server, Service
from labctl.runs import images, wheelhouse
from labctl.runs.run_specs import find_run_image
from labctl.servers.adoption import adopt
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_service_gpus_option
from labctl.servers.job_queue import ensure_node_key, has_job_queue
from labctl.services import services
from labctl.services.background_forwards import (
    BackgroundForwardSpec,
    list_forwards,
    start_background_forward,
    stop_forward,
)
from labctl.services.port_forward import Forwarding, ForwardSpec
from labctl.shell import command
from labctl.state.disks import STOPPED
from labctl.sync import lab_files
from labctl.wire.runs import CLEAR_RUNS
from labctl.wire.services import ServiceRequest
from labctl.wire.verbs import LabRequest

# Build arguments for an image that lacks a service: mlflow is large, and most labs do not use it.
SERVICE_PACKAGES = {"mlflow": {"PACKAGES": "mlflow>=3.1"}}


def forward(context: LabContext, server: Server, name: str, port: int) -> Forwarding:
    """Start a service and open a forward to it, which reconnects after a lost connection."""
    wanted = build_request(context, server, name)
    service = ensure(context, server, wanted)
    return open_forward(context, server, service, port, lambda now: ensure(context, now, wanted))


def build_request(context: LabContext, server: Server, name: str) -> ServiceRequest:
    """Build the request for a known service, a service of lab.yaml, or a port number."""
    if context.config.submits_jobs and not has_job_queue(context):
        raise UsageError(
            "services cannot run as jobs on a course's server yet",
            why="labctl starts them only in the jobs of a cluster with a login node",
            hint="labctl ssh   # then start it by srun",
        )
    config = context.config
    own = config.services.get(name)
    port = require_service(config, name)
    if own is None and services.is_served(name):
        return ServiceRequest(lab=config.name, lab_id=context.lab_id, name=name, image="")
    if config.job_image and (own or name in KNOWN_SERVICE_PORTS):
        raise UsageError(
            f"the service {name} cannot run in {config.job_image} on a cluster",
            why="labctl starts services there only without a container, or from a list of packages",
            hint="labctl exec RUN -- COMMAND   # starts a program in the image\n"
            "labctl forward PORT   # then, for the port that it listens on",
        )
    return ServiceRequest(
        lab=config.name,
        lab_id=context.lab_id,
        name=name,
        image="" if config.job_image else find_run_image(context),
        command=own.command if own else (),
        port=port,
        gpus=choose_service_gpus_option(context, server),
        args=images.build_args(context, config.image) | SERVICE_PACKAGES.get(name, {}),
        wheelhouse=bool(config.wheelhouse),
        data=config.server_data,
        executor=config.server.executor,
        access_key=ensure_node_key(context, server),
    )


def require_service(config: LabConfig, name: str, beside: Sequence[str] = ()) -> int:
    """Return the port of a service of lab.yaml or of a number, 0 for one that labctl starts.

    UsageError if there is no such service. Its hint is a command with all names of `beside`, in
    which the nearest service replaces `name`.
    """
    if own := config.services.get(name):
        return own.port
    if name in KNOWN_SERVICE_PORTS or services.is_served(name):
        return 0
    try:
        return parse_port(name)
    except ValueError:
        if name.lstrip("-").isdecimal():
            raise _make_port_error(name) from None
        known = [*KNOWN_SERVICE_PORTS, *config.services]
        raise _make_unknown_error(name, known, beside) from None


def _make_port_error(port: str) -> UsageError:
    return UsageError(
        f"{port} is not a port",
        why="ports are numbers from 1 to 65535",
        hint="labctl forward 8000",
    )


def _make_unknown_error(name: str, known: Sequence[str], beside: Sequence[str]) -> UsageError:
    near = find_nearest(name, known)
    question = f"did you mean {near}? " if near else ""
    listed = ", ".join(dict.fromkeys(known))
    return UsageError(
        f"unknown service {name!r}",
        why=f"{question}available: {listed}, and any port number of the server; "
        "services: in lab.yaml adds others",
        hint=command("labctl", "forward", *_replace(name, near or known[0], beside)).render(),
    )


def _replace(name: str, other: str, names: Sequence[str]) -> list[str]:
    """Return `names` with `other` in place of `name`, each once; `other` alone without any."""
    return list(dict.fromkeys(other if one == name else one for one in names or [name]))


def ensure(context: LabContext, server: Server, wanted: ServiceRequest) -> Service:
    """Start a service in the lab's image if needed; provide the image if the server lacks it.

    NotFoundError for one that only `labctl serve` starts, if it does not run.
    If another process of this machine is starting it, name that one and wait for it.
    """
    if is_found_only(wanted):
        remote = context.open_agent(server)
        return services.find_served(remote, wanted.lab, wanted.lab_id, wanted.name)
    key = hashlib.sha256(f"{server.id}\0{server.lab_id}\0{wanted.name}".encode()).hexdigest()
    name, what = f"service-{key[:24]}", f"starting {wanted.name}"
    with report_lock_wait(
        context.reporter,
        lambda on_wait, on_progress: context.state.lock(
            name,
            what,
            wait_s=images.IMAGE_S,
            is_command=False,
            on_wait=on_wait,
            on_progress=on_progress,
        ),
    ):
        share = functools.partial(context.state.note_progress, name)
        shared = context.replace_reporter(SharedProgress(context.reporter, share))
        return _ensure_alone(shared, server, wanted)


def is_found_only(wanted: ServiceRequest) -> bool:
    """Whether the request has nothing to start: `labctl serve` alone starts the service."""
    return services.is_served(wanted.name) and not wanted.command and not wanted.image


def _ensure_alone(context: LabContext, server: Server, wanted: ServiceRequest) -> Service:
    remote = context.open_agent(server)

    def provide() -> None:
        lab_files.push(context, server, force=False)
        if wanted.image:
            images.ensure_image(context, server, remote, wanted.image)

    return services.ensure_service(
        remote,
        wanted,
        context.reporter,
        provide_image=provide,
        provide_wheels=lambda: wheelhouse.push_wheelhouse(context, server, remote),
        suggest_wheels=lambda output: images.suggest_wheels(context, server, output),
    )


def open_forward(
    context: LabContext,
    server: Server,
    service: Service,
    port: int,
    restart: Callable[[Server], Service],
) -> Forwarding:
    """Open a local port to `service` while this process runs.

    `restart` restarts the service after a lost connection: on the server's current address, or on
    the server to which a recovery has moved the lab.
    """

    def reopen() -> ForwardSpec:
        now = adopt(context)
        if now is None:
            # To write the ssh_config of a lost server would take its alias from the next one.
            raise ConnectError(f"{context.config.name} has no server now", hint="labctl up")
        return _forward_spec(context, now, restart(now), port)

    spec = _forward_spec(context, server, service, port)
    return Forwarding(spec, context.reporter, reopen).open()


def detach_forward(
    context: LabContext,
    server: Server,
    service: Service,
    request: ServiceRequest,
    port: int,
) -> Forward:
    """Open a local port to `service` in a background process, which outlives this one.

    `labctl forward` opens it again at a server that replaces this one. In a lab with several
    servers, it stays at this one.
    """
    labctl = (sys.executable, "-m", "labctl", "-C", str(context.config.root))
    reopens = context.config.server.count == 1
    spec = BackgroundForwardSpec(
        forward=_forward_spec(context, server, service, port),
        log_path=str(context.paths.log_dir / f"forward-{server.id}-{service.name}.log"),
        request=None if is_found_only(request) else request,
        refresh_argv=(*labctl, "status", "--refresh", "--json"),
        reopen_argv=(*labctl, "forward", "--detach", request.name) if reopens else (),
    )
    return start_background_forward(spec, context.state)


def _forward_spec(context: LabContext, server: Server, service: Service, port: int) -> ForwardSpec:
    return ForwardSpec(
        config=str(context.connections.write(server)),
        server_id=server.id,
        endpoint=server.endpoint,
        service=service,
        local_port=port,
    )


def stop_services(context: LabContext, server: Server) -> None:
    """Stop all services of the lab on the server."""
    config, remote = context.config, context.open_agent(server)
    executor = config.server.executor
    services.stop_service(remote, config.name, context.lab_id, executor=executor)


def remove_containers(context: LabContext, server: Server) -> None:
    """Remove all containers of the lab, or the records of its plain processes, from a server that
    other users may get next."""
    stop_services(context, server)
    remote = context.open_agent(server)
    remote.call(CLEAR_RUNS, LabRequest(context.config.name, context.lab_id))


def stop_forwards(context: LabContext, server: Server) -> tuple[str, ...]:
    """Stop all background forwards to a server that ends or stops; return their services."""
    backgrounds = list_forwards(context.state, server.id)
    for background in backgrounds:
        stop_forward(context.state, background)
    return tuple(dict.fromkeys(background.service for background in backgrounds))


def list_closed_forwards(context: LabContext, server: Server) -> list[str]:
    """List the services whose background forwards the last stop closed, unless open again."""
    for line in context.state.list_events(server_id=server.id, kind=STOPPED, limit=1):
        opened = {one.service for one in list_forwards(context.state, server.id)}
        return [name for name in line.detail.get("forwards", ()) if name not in opened]
    return []

"""What is done with a lab's files and services on its server: the lab's own settings applied."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

from labctl.actions import images
from labctl.actions import push as pushing
from labctl.actions import services as serving
from labctl.actions.forwards import (
    DetachedSpec,
    Forwarding,
    ForwardSpec,
    list_forwards,
    run_detached,
    stop_forward,
)
from labctl.actions.ground import Ground
from labctl.actions.scan import scan_code, scan_data
from labctl.commands.rsync import Way, parse_version
from labctl.commands.ssh import rsync_shell
from labctl.config import KNOWN_SERVICE_PORTS, parse_port
from labctl.errors import UsageError
from labctl.model import Forward, Server, Service, Value


class Pushed(Value, frozen=True):
    """What one tree took. `sent` and `unchanged` count files."""

    target: str
    sent: int
    sent_bytes: int
    removed: int
    unchanged: int


@functools.cache
def _rsync_version() -> tuple[int, int]:
    if not shutil.which("rsync"):
        return (0, 0)
    done = subprocess.run(["rsync", "--version"], capture_output=True, text=True, check=False)
    return parse_version(done.stdout)


def way(ground: Ground, server: Server) -> Way | None:
    """How rsync reaches the server; None where it cannot, then labctl sends the bytes itself."""
    facts = ground.facts(server)
    if not shutil.which("ssh") or _rsync_version() < (3, 1):
        return None
    if not facts.rsync or facts.noisy_shell:
        return None
    shell = rsync_shell(str(ground.connections.config_path(server.id)))
    return Way(shell=shell, host=server.id, version=_rsync_version())


def push(ground: Ground, server: Server, *, force: bool) -> list[Pushed]:
    """The lab's code, its data directories, and this machine's wheelhouse if it has one."""
    config, reporter = ground.config, ground.reporter
    inside = [one.path for one in config.data.values() if one.path and one.inside_lab]
    trees = [("code", config.root, scan_code(config.root, reporter, data=inside))]
    for name, source in config.data.items():
        if source.path is not None:
            files = scan_data(config.root, name, source.path, reporter)
            trees.append((f"data/{name}", source.path, files))
    if config.wheelhouse and images.chosen(ground).build:
        wheels = Path(config.wheelhouse)
        trees.append(("wheelhouse", wheels, scan_data(config.root, "wheelhouse", wheels, reporter)))
    remote, route = ground.remote(server), way(ground, server)
    done = []
    for target, root, files in trees:
        result = pushing.push(
            remote,
            config.name,
            ground.lab_id,
            target,
            root,
            files,
            reporter,
            force=force,
            ssh=route,
        )
        done.append(
            Pushed(
                target=target,
                sent=result.sent,
                sent_bytes=result.bytes,
                removed=result.removed,
                unchanged=result.unchanged,
            )
        )
    for name, source in config.data.items():
        if source.url:
            _fetch(ground, server, name, source.url)
    return done


def _fetch(ground: Ground, server: Server, name: str, url: str) -> None:
    from labctl.actions.fetch import fetch_data

    fetch_data(ground.remote(server), ground.config.name, ground.lab_id, name, url, ground.reporter)


def service_request(ground: Ground, server: Server, name: str) -> serving.ServiceRequest:
    """A service by name: TensorBoard, Jupyter, one of lab.yaml's, or a port of the server."""
    from labctl.actions.prepare import gpu_for

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
    return serving.ServiceRequest(
        lab=config.name,
        lab_id=ground.lab_id,
        name=name,
        image=images.reference(ground),
        command=own.command if own else (),
        port=port,
        gpus=gpu_for(config.server.need, ground.facts(server), None),
        args=images.build_args(ground, images.chosen(ground)),
        wheelhouse=bool(config.wheelhouse),
    )


def _ensure(ground: Ground, server: Server, wanted: serving.ServiceRequest) -> Service:
    remote = ground.remote(server)

    def provide() -> None:
        push(ground, server, force=False)
        images.ensure(ground, server, remote, wanted.image)

    return serving.ensure_service(remote, wanted, ground.reporter, provide_image=provide)


def _spec(ground: Ground, server: Server, service: Service, port: int) -> ForwardSpec:
    return ForwardSpec(
        config=str(ground.connections.write(server)),
        server_id=server.id,
        endpoint=server.endpoint,
        service=service,
        local_port=port,
    )


def forward(ground: Ground, server: Server, name: str, port: int) -> Forwarding:
    """An open forward to a service that runs; it comes back by itself after a cut."""
    wanted = service_request(ground, server, name)

    def again() -> Service:
        from labctl.actions.provision import adopt

        now = adopt(ground) or server
        ground.connections.write(now)
        return _ensure(ground, now, wanted)

    spec = _spec(ground, server, _ensure(ground, server, wanted), port)
    return Forwarding(spec, ground.reporter, again).open()


def forward_detached(ground: Ground, server_name: str, port: int) -> Forward:
    """A forward that goes on when this process ends."""
    server = ground.server()
    wanted = service_request(ground, server, server_name)
    service = _ensure(ground, server, wanted)
    spec = DetachedSpec(
        forward=_spec(ground, server, service, port),
        log_path=str(ground.paths.log_dir / f"forward-{server.id}-{service.name}.log"),
        request=wanted,
    )
    return run_detached(spec, ground.state)


def kept(ground: Ground) -> list[Forward]:
    """The detached forwards that live."""
    return list_forwards(ground.state)


def stopped(ground: Ground, names: tuple[str, ...]) -> list[Forward]:
    """End the detached forwards of these services or ids, or all where none is named."""
    return [one for name in names or ("all",) for one in stop_forward(ground.state, name)]


def stop_forwards(ground: Ground, server: Server) -> None:
    """End what leads to a server that is about to go."""
    for one in list_forwards(ground.state, server.id):
        stop_forward(ground.state, one.id, server.id)

"""What is done with a lab's files and services on its server: the lab's own settings applied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from labctl.actions import images, runs, sync
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
from labctl.actions.scan import Index
from labctl.actions.transfers import WAIT_S, hold_transfers
from labctl.config import KNOWN_SERVICE_PORTS, parse_port
from labctl.errors import UsageError
from labctl.model import FileEntry, Forward, Server, Service, Value

Tree = tuple[str, Path, Sequence[FileEntry], Index]
"""Where it goes on the server, where it lies here, its files, and the index that they are in."""


class Pushed(Value, frozen=True):
    """What one tree took. `sent` and `unchanged` count files."""

    target: str
    sent: int
    sent_bytes: int
    removed: int
    unchanged: int


def push(ground: Ground, server: Server, *, force: bool) -> list[Pushed]:
    """The lab's code and its data directories; what has an address is fetched by the server."""
    config = ground.config
    inside = [one.path for one in config.data.values() if one.path and one.inside_lab]
    index = Index(config.root, "code")
    code = sync.scan_code(config.root, ground.reporter, data=inside, later=index)
    return [
        *_sent(ground, server, [("code", config.root, code, index)], force=force),
        *push_data(ground, server, force=force),
    ]


def push_data(ground: Ground, server: Server, *, force: bool = False) -> list[Pushed]:
    """The data alone: directories from here, addresses fetched by the server."""
    config, reporter = ground.config, ground.reporter
    trees = []
    for name, source in config.data.items():
        if source.path is not None:
            index = Index(config.root, f"data/{name}")
            files = sync.scan_data(config.root, name, source.path, reporter, later=index)
            trees.append((f"data/{name}", source.path, files, index))
    done = _sent(ground, server, trees, force=force) if trees else []
    urls = {name: source.url for name, source in config.data.items() if source.url}
    if urls:
        sync.fetch_data(ground.remote(server), config.name, ground.lab_id, urls, reporter)
    return done


def _sent(ground: Ground, server: Server, trees: Sequence[Tree], *, force: bool) -> list[Pushed]:
    with hold_transfers(ground.config.root, "push", ground.reporter):
        return _sent_alone(ground, server, trees, force=force)


def _sent_alone(
    ground: Ground, server: Server, trees: Sequence[Tree], *, force: bool
) -> list[Pushed]:
    config, reporter = ground.config, ground.reporter
    remote = ground.remote(server)
    done = []
    for target, root, files, index in trees:
        result = sync.push(
            remote,
            config.name,
            ground.lab_id,
            target,
            root,
            files,
            reporter,
            force=force,
            index=index,
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
    return done


def pull(
    ground: Ground,
    server: Server,
    run_ids: list[str],
    *,
    everything: bool,
    wait_s: float = WAIT_S,
) -> list[sync.PulledRun]:
    """Outputs of these runs (of all, if empty) to `<lab>/runs/`, whole and verified.

    BusyError where another transfer of the lab goes on for longer than `wait_s`.
    """
    remote = ground.remote(server)
    runs.refresh(ground, server, remote)
    result = sync.pull(
        remote,
        ground.config.name,
        ground.lab_id,
        run_ids,
        ground.config.root,
        reporter=ground.reporter,
        everything=everything,
        records=ground.state.runs(ground.lab_id),
        wait_s=wait_s,
    )
    return list(result.runs)


def missing(ground: Ground, server: Server) -> tuple[sync.Missing, ...]:
    """Every file that runs have left on the server and that is not on the disk here."""
    about = (ground.remote(server), ground.config.name, ground.lab_id)
    return sync.verify(*about, [], ground.config.root, everything=True)


def save_edits(ground: Ground, server: Server) -> sync.EditsResult:
    """Keep what was edited on the server below `<lab>/server-edits/`."""
    return _edits(ground, server, sync.pull_edits)


def pull_code(ground: Ground, server: Server) -> list[str]:
    """Bring what was edited on the server into the lab; the paths of all that came."""
    result = _edits(ground, server, sync.pull_code)
    return [*result.brought, *(f"{result.directory}/{name}" for name in result.saved)]


def _edits(
    ground: Ground, server: Server, flow: Callable[..., sync.EditsResult]
) -> sync.EditsResult:
    return flow(
        ground.remote(server),
        ground.config.name,
        ground.lab_id,
        ground.config.root,
        reporter=ground.reporter,
    )


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
        args=images.build_args(ground, config.image),
        wheelhouse=bool(config.wheelhouse),
    )


def _ensure(ground: Ground, server: Server, wanted: serving.ServiceRequest) -> Service:
    remote = ground.remote(server)

    def provide() -> None:
        push(ground, server, force=False)
        images.ensure(ground, server, remote, wanted.image)

    return serving.ensure_service(
        remote,
        wanted,
        ground.reporter,
        provide_image=provide,
        provide_wheels=lambda: images.push_wheelhouse(ground, server, remote),
    )


def forward_spec(ground: Ground, server: Server, service: Service, port: int) -> ForwardSpec:
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

    spec = forward_spec(ground, server, _ensure(ground, server, wanted), port)
    return Forwarding(spec, ground.reporter, again).open()


def forward_detached(ground: Ground, server_name: str, port: int) -> Forward:
    """A forward that goes on when this process ends."""
    server = ground.server()
    wanted = service_request(ground, server, server_name)
    service = _ensure(ground, server, wanted)
    spec = DetachedSpec(
        forward=forward_spec(ground, server, service, port),
        log_path=str(ground.paths.log_dir / f"forward-{server.id}-{service.name}.log"),
        request=wanted,
        refresh_argv=refresh_argv(ground),
    )
    return run_detached(spec, ground.state)


def refresh_argv(ground: Ground) -> tuple[str, ...]:
    """What writes the server's present address into its ssh_config."""
    lab = str(ground.config.root)
    return (sys.executable, "-m", "labctl", "-C", lab, "status", "--refresh", "--json")


def kept(ground: Ground) -> list[Forward]:
    """The detached forwards that live."""
    return list_forwards(ground.state)


def stopped(ground: Ground, names: tuple[str, ...]) -> list[Forward]:
    """End the detached forwards of these services or ids, or all where none is named."""
    return [one for name in names or ("all",) for one in stop_forward(ground.state, name)]


def stop_services(ground: Ground, server: Server) -> None:
    serving.stop_service(ground.remote(server), ground.config.name, ground.lab_id)


def tidy(ground: Ground, server: Server) -> None:
    """Leave no container of ours behind on a server that others may get next."""
    stop_services(ground, server)
    remote = ground.remote(server)
    remote.call("clear", {"lab": ground.config.name, "lab_id": ground.lab_id})


def stop_forwards(ground: Ground, server: Server) -> None:
    """End what leads to a server that is about to go."""
    for one in list_forwards(ground.state, server.id):
        stop_forward(ground.state, one.id, server.id)

"""A trained model, or any image with a port, behind a forward: what `labctl serve` does."""

from __future__ import annotations

import http.client

import msgspec

from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.model import Forward, Run, Server, Service, Value
from labctl.runs import images, runs
from labctl.servers.context import Ground
from labctl.servers.prepare import gpu_for
from labctl.services import lab_services
from labctl.services.forwards import Forwarding, list_forwards, stop_forward
from labctl.services.services import (
    ServedModel,
    ServiceRequest,
    ensure_service,
    services,
    stop_service,
)
from labctl.sync import lab_files
from labctl.sync.push import push
from labctl.sync.scan import Index, scan_data
from labctl.sync.transfer_lock import hold_transfers

NAME = "serve"
PORT = 8000
# What the server program imports; added to the run's own image where it lacks one of them.
PACKAGES = "fastapi uvicorn python-multipart prometheus-client pillow"
# How long a model may take to load, if the caller says nothing else.
LOADING_S = 600.0
NEXT = "labctl serve --stop, then labctl serve"
LARGEST_REPLY_BYTES = 1 << 20


class Choice(Value, frozen=True, kw_only=True):
    """Which model is served, and how.

    `run` "" is the latest. `checkpoint` is below the run's checkpoints, "" lets the project choose.
    With `push` the code as it is here loads the model, else the run's own. `env` may hold the
    settings of labctl/services/model_server/settings.py.
    """

    run: str = ""
    checkpoint: str = ""
    push: bool = False
    env: dict[str, str] = msgspec.field(default_factory=dict)
    loading_s: float = LOADING_S


class Health(Value, frozen=True):
    """The model that is served: its run, its checkpoint, and how many classes it tells apart."""

    run: str
    checkpoint: str
    classes: int


class _Told(Value, frozen=True):
    status: str
    model: Health


def of_model(ground: Ground, server: Server, choice: Choice) -> ServiceRequest:
    """The service that serves a run's model; code and checkpoints are sent where need be.

    NotFoundError where the run is neither on the server nor here, PolicyError where what was pulled
    holds more than data.
    """
    run = runs.latest(ground, choice.run)
    there = run.server_id == server.id
    if not there:
        _send(ground, server, run)
    own_code = there and not choice.push
    if not own_code:
        lab_files.push(ground, server, force=False)
    model = ServedModel(
        run=run.id,
        where="run" if there else "here",
        code="run" if own_code else "lab",
        checkpoint=choice.checkpoint,
    )
    base = _request(ground, server, NAME, choice.env, choice.loading_s)
    return msgspec.structs.replace(
        base,
        image=run.image if own_code and run.image else images.reference(ground),
        args={**images.build_args(ground, ground.config.image), "PACKAGES": PACKAGES},
        wheelhouse=bool(ground.config.wheelhouse),
        env={**ground.config.env, **choice.env},
        model=model,
    )


def of_image(
    ground: Ground,
    server: Server,
    image: str,
    port: int,
    *,
    command: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    loading_s: float = LOADING_S,
) -> ServiceRequest:
    """Any image that listens at `port`; `command` follows its own entrypoint."""
    base = _request(ground, server, f"{NAME}-{port}", env or {}, loading_s)
    return msgspec.structs.replace(base, image=image, port=port, command=command, as_is=True)


def forward(ground: Ground, server: Server, wanted: ServiceRequest, port: int = 0) -> Forwarding:
    """The service, running, and an open forward to it; `port` 0 is the one it has itself."""
    # Somebody may serve another model by the time of a cut: that one stays.
    later = msgspec.structs.replace(wanted, replace=False)
    return lab_services.open_forward(
        ground,
        server,
        _ensured(ground, server, wanted),
        port or wanted.port or PORT,
        lambda now: _ensured(ground, now, later),
    )


def forward_detached(
    ground: Ground, server: Server, wanted: ServiceRequest, port: int = 0
) -> Forward:
    """The same with a forward that goes on when this process ends."""
    service = _ensured(ground, server, wanted)
    for one in list_forwards(ground.state, server.id):
        # It leads to where the service was before it was started anew.
        if one.service == service.name and one.remote_port != service.port:
            stop_forward(ground.state, one.id, server.id)
    later = msgspec.structs.replace(wanted, replace=False)
    port = port or wanted.port or PORT
    return lab_services.detach_forward(ground, server, service, later, port)


def stop(ground: Ground, server: Server) -> list[str]:
    """End whatever `serve` started on the server, and the forwards to it; the services' names."""
    remote = ground.remote(server)
    for one in list_forwards(ground.state, server.id):
        if _is_ours(one.service):
            stop_forward(ground.state, one.id, server.id)
    found = services(remote, ground.config.name, ground.lab_id)
    ended: list[str] = []
    for service in found:
        if _is_ours(service.name):
            ended += stop_service(remote, ground.config.name, ground.lab_id, service.name)
    return ended


def health(port: int) -> Health:
    """What labctl's server says of its model at a local port; LabError where it is not well."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/healthz")
        with connection.getresponse() as reply:
            found = msgspec.json.decode(reply.read(LARGEST_REPLY_BYTES), type=_Told)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise LabError("the model's server does not answer", why=str(error), hint=NEXT) from None
    finally:
        connection.close()
    if reply.status != 200:
        raise LabError("the model's server is not well", why=found.status, hint=NEXT)
    return found.model


def _is_ours(name: str) -> bool:
    return name == NAME or name.startswith(f"{NAME}-")


def _request(
    ground: Ground, server: Server, name: str, env: dict[str, str], loading_s: float
) -> ServiceRequest:
    limits = ground.config.limits
    return ServiceRequest(
        lab=ground.config.name,
        lab_id=ground.lab_id,
        name=name,
        image="",
        gpus=gpu_for(ground.config.server.need, ground.facts(server), None),
        env=env,
        replace=True,
        deadline_s=loading_s,
        memory_bytes=limits.memory_bytes,
        cpus=limits.cpus,
        shm_bytes=limits.shm_bytes,
    )


def _ensured(ground: Ground, server: Server, wanted: ServiceRequest) -> Service:
    remote = ground.remote(server)
    model = wanted.model
    of_run = model.run if model is not None and model.code == "run" else ""

    def provide() -> None:
        if wanted.as_is:
            images.fetch(ground, server, remote, wanted.image)
        else:
            images.ensure(ground, server, remote, wanted.image, of_run)

    return ensure_service(
        remote,
        wanted,
        ground.reporter,
        provide_image=provide,
        provide_wheels=lambda: images.push_wheelhouse(ground, server, remote),
    )


def _send(ground: Ground, server: Server, run: Run) -> None:
    """The checkpoints that were pulled, onto a server that never saw the run."""
    from labctl.services.model_server.checkpoint import check
    from labctl.services.model_server.refusals import ModelError

    here = ground.config.root / "runs" / run.id / "checkpoints"
    if not here.is_dir():
        raise NotFoundError(
            f"run {run.id} is neither on this server nor here",
            why="its checkpoints are served from where it ran, or from what was pulled",
            hint=f"labctl pull {run.id}",
        )
    try:
        check(here)
    except ModelError as error:
        raise PolicyError(
            f"the checkpoints of run {run.id} are refused",
            why=str(error),
            hint="save weights as safetensors (safetensors.torch.save_file), then: labctl run",
        ) from None
    root, name = ground.config.root, f"model-{run.id}"
    index = Index(root, f"data/{name}")
    files = scan_data(root, name, here, ground.reporter, later=index)
    about = (ground.remote(server), ground.config.name, ground.lab_id, f"model/{run.id}")
    with hold_transfers(root, "push", ground.reporter):
        push(*about, here, files, ground.reporter, force=True, index=index)

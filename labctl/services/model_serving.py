"""Serve a trained model, or any image with a port, behind a forward (`labctl serve`)."""

from __future__ import annotations

import http.client

import msgspec

from labctl.decoding import decode_json
from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.lazy import lazy_imports
from labctl.model import Forward, Run, Server, Service, Value
from labctl.runs import image_sources, images, runs, wheelhouse
from labctl.runs.checkpointed_runs import NONE_HAS_ANY, has_saved_none, suggest_other_run
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_container_gpus_option
from labctl.services import lab_services
from labctl.services.background_forwards import list_forwards, stop_forward
from labctl.services.port_forward import Forwarding
from labctl.services.services import (
    SERVED_PORT,
    ensure_service,
    is_served,
    list_services,
    stop_service,
)
from labctl.sync import lab_files
from labctl.sync.push import push_tree
from labctl.sync.scan import HashIndex, scan_data
from labctl.sync.transfer_lock import hold_transfers
from labctl.wire.model_files import describe_saving, find_model
from labctl.wire.services import (
    NEEDS_CHECKPOINT,
    NEEDS_PREDICT,
    SAVE_CHECKPOINT,
    WRITE_PREDICT,
    ServedModel,
    ServiceRequest,
)

with lazy_imports(__name__):
    from labctl.services.model_server import checkpoint, refusals

NAME = "serve"
# Packages of the server program, installed into the run's image if it lacks one of them.
PACKAGES = "fastapi uvicorn python-multipart prometheus-client pillow"
# default limit in seconds for loading a model
LOADING_S = 600.0
NEXT = "labctl serve --stop && labctl serve"
LARGEST_REPLY_BYTES = 1 << 20


class ServeChoice(Value, frozen=True, kw_only=True):
    """Which model to serve, and how.

    `run` "" is the latest. `checkpoint` is one of the run's checkpoints, "" lets the project
    choose. With `push`, the lab's current code loads the model, else the run's own code. `env` may
    contain settings of labctl/services/model_server/settings.py.
    """

    run: str = ""
    checkpoint: str = ""
    push: bool = False
    env: dict[str, str] = msgspec.field(default_factory=dict)
    loading_s: float = LOADING_S


class Health(Value, frozen=True):
    """The served model: its run, its checkpoint, and its number of classes.

    `columns` are those of the table that it was trained on, () for a model of images.
    """

    run: str
    checkpoint: str
    classes: int
    columns: tuple[str, ...] = ()


class _HealthReply(Value, frozen=True):
    status: str
    model: Health


def request_model(context: LabContext, server: Server, choice: ServeChoice) -> ServiceRequest:
    """Build the request for a service that serves a run's model; send code and checkpoints.

    NotFoundError if the run is neither on the server nor on this machine, or if the code on this
    machine would load it and has no predict.py; PolicyError if its pulled checkpoints contain
    pickles.
    """
    run = runs.find_run(context, choice.run)
    is_on_server = run.server_id == server.id
    own_code = is_on_server and not choice.push
    if not own_code and not (context.config.root / "predict.py").is_file():
        raise NotFoundError(
            "the lab's code has no predict.py", why=NEEDS_PREDICT, hint=WRITE_PREDICT
        )
    if not is_on_server:
        _send_checkpoints(context, server, run)
    if not own_code:
        lab_files.push(context, server, force=False)
    model = ServedModel(
        run=run.id,
        where="run" if is_on_server else "here",
        code="run" if own_code else "lab",
        checkpoint=choice.checkpoint,
    )
    base = _base_request(context, server, NAME, choice.env, choice.loading_s)
    return base._replace(
        image=run.image if own_code and run.image else images.image_reference(context),
        args={**images.build_args(context, context.config.image), "PACKAGES": PACKAGES},
        wheelhouse=bool(context.config.wheelhouse),
        env={**context.config.env, **choice.env},
        model=model,
    )


def request_image(
    context: LabContext,
    server: Server,
    image: str,
    port: int,
    *,
    command: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    loading_s: float = LOADING_S,
) -> ServiceRequest:
    """Build the request for any image that listens on `port`; `command` follows its entrypoint."""
    base = _base_request(context, server, f"{NAME}-{port}", env or {}, loading_s)
    return base._replace(image=image, port=port, command=command, as_is=True)


def forward(
    context: LabContext, server: Server, wanted: ServiceRequest, port: int = 0
) -> Forwarding:
    """Start the service and open a forward to it; `port` 0 is the service's own port."""
    # After a lost connection, a different model that was served meanwhile is kept.
    later = wanted._replace(replace=False)
    return lab_services.open_forward(
        context,
        server,
        ensure(context, server, wanted),
        port or wanted.port or SERVED_PORT,
        lambda now: ensure(context, now, later),
    )


def forward_detached(
    context: LabContext, server: Server, wanted: ServiceRequest, port: int = 0
) -> Forward:
    """Start the service, and a background forward that outlives this process."""
    service = ensure(context, server, wanted)
    for old in list_forwards(context.state, server.id):
        # This one leads to the service's port before its restart.
        if old.service == service.name and old.remote_port != service.port:
            stop_forward(context.state, old)
    later = wanted._replace(replace=False)
    port = port or wanted.port or SERVED_PORT
    return lab_services.detach_forward(context, server, service, later, port)


def stop(context: LabContext, server: Server) -> list[str]:
    """Stop all that `serve` started on the server, and the forwards; return the services' names."""
    remote = context.open_agent(server)
    for background in list_forwards(context.state, server.id):
        if is_served(background.service):
            stop_forward(context.state, background)
    stopped: list[str] = []
    for service in list_services(remote, context.config.name, context.lab_id):
        if is_served(service.name):
            stopped += stop_service(remote, context.config.name, context.lab_id, service.name)
    return stopped


def check_health(port: int) -> Health:
    """Ask the model server at a local port for its health; LabError if it is not healthy."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/healthz")
        with connection.getresponse() as reply:
            body = decode_json(reply.read(LARGEST_REPLY_BYTES), _HealthReply)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise LabError("the model server does not answer", why=str(error), hint=NEXT) from None
    finally:
        connection.close()
    if reply.status != 200:
        raise LabError("the model server is not healthy", why=body.status, hint=NEXT)
    return body.model


def _base_request(
    context: LabContext, server: Server, name: str, env: dict[str, str], loading_s: float
) -> ServiceRequest:
    limits = context.config.limits
    return ServiceRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        name=name,
        image="",
        gpus=choose_container_gpus_option(context, server),
        env=env,
        replace=True,
        deadline_s=loading_s,
        memory_bytes=limits.memory_bytes,
        cpus=limits.cpus,
        shm_bytes=limits.shm_bytes,
    )


def ensure(context: LabContext, server: Server, wanted: ServiceRequest) -> Service:
    """Start the service if needed; provide its image, and wait until it answers."""
    remote = context.open_agent(server)
    model = wanted.model
    of_run = model.run if model is not None and model.code == "run" else ""

    def provide() -> None:
        if wanted.as_is:
            image_sources.provide_image(context, server, remote, wanted.image)
        else:
            if wanted.test:  # no run has pushed the code that the image is built from
                lab_files.push(context, server, force=False)
            images.ensure_image(context, server, remote, wanted.image, of_run)

    return ensure_service(
        remote,
        wanted,
        context.reporter,
        provide_image=provide,
        provide_wheels=lambda: wheelhouse.push_wheelhouse(context, server, remote),
        suggest_wheels=lambda output: images.suggest_wheels(context, server, output),
    )


def _make_missing_run_error(context: LabContext, run: Run) -> NotFoundError:
    """Make the error for a run whose checkpoints are neither on the server nor here."""
    other = suggest_other_run(context, run.id, "labctl", "serve", on_server=True)
    if has_saved_none(run):
        why = NEEDS_CHECKPOINT if other else f"{NEEDS_CHECKPOINT}; {NONE_HAS_ANY}"
        model, saving = find_model(run.new_files), SAVE_CHECKPOINT
        if model is not None:
            why = f"{NEEDS_CHECKPOINT}; this run wrote {model} instead"
            saving = describe_saving(model)
        hint = f"{other}\n{saving}" if other else saving
        return NotFoundError(f"run {run.id} has no checkpoints", why=why, hint=hint)
    return NotFoundError(
        f"run {run.id} is neither on this server nor on this machine",
        why="serve needs the checkpoints on the server that the run was on, or a pulled copy",
        hint="\n".join(filter(None, [f"labctl pull {run.id}", other])),
    )


def _send_checkpoints(context: LabContext, server: Server, run: Run) -> None:
    """Send the pulled checkpoints to a server that does not have the run."""
    checkpoints = context.config.root / "runs" / run.id / "checkpoints"
    if not checkpoints.is_dir():
        raise _make_missing_run_error(context, run)
    try:
        checkpoint.check(checkpoints)
    except refusals.ModelError as error:
        raise PolicyError(
            f"the checkpoints of run {run.id} are refused",
            why=str(error),
            hint="save weights as safetensors (safetensors.torch.save_file), then:\nlabctl run",
        ) from None
    root, name = context.config.root, f"model-{run.id}"
    index = HashIndex(root, f"data/{name}")
    files = scan_data(root, name, checkpoints, context.reporter, later=index)
    target = (context.open_agent(server), context.config.name, context.lab_id, f"model/{run.id}")
    with hold_transfers(root, "push", context.reporter):
        push_tree(*target, checkpoints, files, context.reporter, force=True, index=index)

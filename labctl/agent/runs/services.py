"""Services: TensorBoard, Jupyter or any command with a port, each in a container of its own.

The truth about a service is its container: its labels, and the port that Docker published on the
server's loopback. The container is named `<lab directory>-svc-<name>`, so there is at most one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...wire.services import (
    ListServicesReply,
    ListServicesRequest,
    ServiceImageOpening,
    ServiceRecord,
    ServiceReply,
    ServiceRequest,
    StopServiceReply,
    StopServiceRequest,
)
from ...wire.verbs import CONFIG_FILE
from ..broker.detection import is_brokered
from ..host import engine
from ..host.docker import run_docker
from ..host.engine import inspect_container, inspect_containers, inspect_image
from ..host.engine_objects import Container, Image, Mount, NewContainer, PortBinding
from ..host.paths import (
    lab_dir,
    read_text,
    require_name,
    write_text,
)
from ..reply import Failure, send_reply
from . import language_models, serve, service_images
from .containers import (
    ContainerLab,
    ResourceLimits,
    build_lab_container,
    build_mount,
    limit,
)
from .healthcheck import is_http_ready, is_listening
from .images import run_build
from .known_services import KNOWN, TOKEN_FILE
from .service_ports import create_and_start

# How long a service may take until its port answers, unless the request has a deadline.
READY_S = 90.0


def start(request: ServiceRequest) -> ServiceReply:
    """Start a service, or find it running; reply once its port answers.

    After the request's deadline it raises Failure (service) with the end of the container's log,
    and removes the container.
    """
    root = lab_dir(request.lab, request.lab_id)
    name = require_name(request.name)
    with lock_service(root, name):
        container = _container_name(root, name)
        inspected = inspect_container(container)
        is_stale = False
        if inspected and inspected.State.Running:
            is_stale = _has_other_settings(inspected, request)
            if not (is_stale and request.replace):
                service = _describe_service(root, _wait_until_ready(container, request), name)
                return ServiceReply(*service, found=True, stale=is_stale)
        if request.model is not None:
            serve.require_model(root, request.model)
        language_models.require_weights(root, request)
        base_image = inspect_image(request.image)
        if base_image is None:
            return ServiceReply(missing=request.image)
        service_image = service_images.find_service_image(base_image, request)
        if service_image is None:
            return ServiceReply(lacks=name, tag=service_images.image_tag(base_image, request))
        language_models.remove_secrets(root, name)  # those of the service that is replaced
        try:
            body = _build_container(root, service_image, request)
            if inspected:
                _stop_container(container)
            _launch(container, body, request)
            inspected = _wait_until_ready(container, request)
        except BaseException:
            language_models.remove_secrets(root, name)
            raise
    return ServiceReply(*_describe_service(root, inspected, name), replaced=is_stale)


def status(request: ListServicesRequest) -> ListServicesReply:
    """List every service of the lab that has a container, running or not."""
    root = lab_dir(request.lab, request.lab_id)
    inspected = inspect_containers(_list_containers(root, request.lab_id))
    return ListServicesReply(
        tuple(
            _describe_service(root, container, container.labels["labctl.service"])
            for _, container in sorted(inspected.items())
        )
    )


def stop(request: StopServiceRequest) -> StopServiceReply:
    """Remove one service, or all services of the lab. An absent service is not an error."""
    root = lab_dir(request.lab, request.lab_id)
    selected = _container_name(root, require_name(request.name)) if request.name else ""
    stopped = []
    for container in _list_containers(root, request.lab_id):
        if selected not in ("", container):
            continue
        _stop_container(container)
        name = container[len(_container_name(root, "")) :]
        token = find_token(root, name)
        if token.exists():
            token.unlink()
        language_models.remove_secrets(root, name)
        stopped.append(name)
    return StopServiceReply(tuple(sorted(stopped)))


def _stop_container(container: str) -> None:
    """Stop a container, with 10 s to finish, and remove it."""
    run_docker("stop", "--time", "10", container, check=False)
    engine.remove_container(container)


def build(request: ServiceRequest) -> None:
    """Build the request's Dockerfile on top of its image; stream and log as `images.build` does."""
    root = lab_dir(request.lab, request.lab_id)
    base_image = inspect_image(request.image)
    if base_image is None:
        raise Failure("missing", f"the image {request.image} is not on the server")
    if is_brokered():
        message = f"{request.image} lacks {request.name}, and this shared server cannot add it"
        hint = "ask the course's staff for an image with it, or install it in your own image"
        raise Failure("policy", message, "images are built without Docker's engine here", hint)
    tag = service_images.image_tag(base_image, request)
    context = root / "builds" / tag.replace(":", "-")
    context.mkdir(parents=True, exist_ok=True)
    write_text(context / "Dockerfile", request.dockerfile)
    log = context / "build.log"
    send_reply(ServiceImageOpening(str(log), tag))
    args = {**request.args, "BASE": base_image.Id}
    words = ["docker", "build", "--tag", tag]
    run_build(words, args, request.wheelhouse, log, context)


def _container_name(root: Path, name: str) -> str:
    return f"{root.name}-svc-{name}"


def _list_containers(root: Path, lab_id: str) -> list[str]:
    """List the names of this lab's service containers on this server."""
    words = ["ps", "--all", "--format", "{{.Names}}", "--filter", "label=labctl.service"]
    names = run_docker(*words, "--filter", f"label=labctl.lab-id={lab_id}").stdout.split()
    return [name for name in names if name.startswith(_container_name(root, ""))]


@contextmanager
def lock_service(root: Path, name: str) -> Iterator[None]:
    """Make two callers who start the same service wait for each other."""
    with (root / ".labctl" / f"service-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def get_port(request: ServiceRequest) -> int:
    """Return the port inside the container. Failure (usage) without a valid one."""
    known = KNOWN.get(request.name)
    port = request.port or (known.port if known else 0)
    if not 0 < port < 65536:
        message = f"the service {request.name} needs a port"
        hint = ("add it in ", CONFIG_FILE, ": services: {NAME: {port: 8000}}")
        raise Failure("usage", message, "", hint)
    return port


def _build_argv(request: ServiceRequest) -> list[str]:
    """Return the service's argv, [] for an image's own. Failure (usage) without a known command."""
    if request.command or request.as_is:
        return list(request.command)
    preset = KNOWN.get(request.name)
    if preset is None:
        message = f"the service {request.name} has no command"
        raise Failure("usage", message, "", ("add a command for it in ", CONFIG_FILE))
    return ["/bin/sh", "-c", preset.script, request.name, str(get_port(request))]


def hash_settings(request: ServiceRequest) -> str:
    settings = [request.image, _build_argv(request), get_port(request), request.gpus]
    settings += serve.describe_model_settings(request) or ([request.env] if request.env else [])
    settings += [request.data] if request.data else []
    settings += [request.weights] if request.weights else []
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _has_other_settings(inspected: Container, request: ServiceRequest) -> bool:
    """Return whether the service runs with another image, command or port than this request's."""
    return bool(inspected.labels.get("labctl.service-wish") != hash_settings(request))


def _launch(container: str, body: NewContainer, request: ServiceRequest) -> None:
    try:
        create_and_start(container, body, get_port(request))
    except engine.EngineRequestError as refused:
        message = f"the service {request.name} did not start"
        raise Failure("docker", message, refused.message[-1500:], "labctl doctor") from None


def _build_container(root: Path, image: Image, request: ServiceRequest) -> NewContainer:
    name, argv, port = request.name, _build_argv(request), get_port(request)
    env = {**request.env, "LABCTL_DATA_DIR": "/lab/data"}
    env["LABCTL_SERVICE_PORT"] = str(port)
    if request.model:
        mounts = serve.build_mounts(root, request.model, request.app)
        env.update(serve.build_env(request.model))
    elif request.test:
        mounts = language_models.build_mounts(root, request)
    else:
        mounts = _lab_mounts(root, request)
    if name == "jupyter":
        mounts.append(build_mount(ensure_token(root, name), TOKEN_FILE, read_only=True))
        env["JUPYTER_TOKEN_FILE"] = TOKEN_FILE
    labels = {"labctl.service": name, "labctl.service-port": str(port)}
    labels["labctl.service-wish"] = hash_settings(request)
    lab = ContainerLab(request.lab, request.lab_id, request.gpus, request.data)
    container = build_lab_container(root, lab, image, mounts, env, labels)
    published = (PortBinding(HostIp="127.0.0.1"),)
    config = container.HostConfig._replace(Init=True, PortBindings={f"{port}/tcp": published})
    if request.model or request.test:
        config = serve.lock_down(config)
    if request.model or request.test or request.as_is:
        limits = ResourceLimits(request.memory_bytes, request.cpus, request.shm_bytes)
        config = limit(config, limits)
    container = container._replace(ExposedPorts={f"{port}/tcp": {}}, HostConfig=config)
    if request.as_is:
        container = container._replace(WorkingDir=image.config.WorkingDir or "/")
        return container._replace(Cmd=tuple(argv)) if argv else container
    if request.command and not request.test:
        return container._replace(Cmd=tuple(argv))
    return container._replace(Entrypoint=tuple(argv[:1]), Cmd=tuple(argv[1:]))


def _lab_mounts(root: Path, request: ServiceRequest) -> list[Mount]:
    """Mount the lab's code and runs. A third-party image (`as_is`) may not write there."""
    for each in ("code", "runs"):
        (root / each).mkdir(exist_ok=True)
    foreign = request.as_is
    reads_only = foreign or request.name in ("tensorboard", "mlflow")
    return [
        build_mount(root / "code", "/lab/code", read_only=foreign),
        build_mount(root / "runs", "/lab/runs", read_only=reads_only),
    ]


def find_token(root: Path, name: str) -> Path:
    return root / ".labctl" / f"service-{name}.token"


def ensure_token(root: Path, name: str) -> Path:
    """Return the file with the service's token, made once so that a printed address stays valid."""
    path = find_token(root, name)
    if not path.exists():
        write_text(path, secrets.token_urlsafe(32), 0o600)
    return path


def _describe_service(root: Path, inspected: Container, name: str) -> ServiceRecord:
    socket, known = _get_socket(inspected), KNOWN.get(name)
    return ServiceRecord(
        name=name,
        port=_get_inner_port(inspected) if socket else _get_published_port(inspected),
        socket=socket,
        token=read_text(find_token(root, name)) if name == "jupyter" else "",
        path=known.path if known else "/",
        container=inspected.Name.lstrip("/"),
        running=inspected.State.Running,
    )


def _get_published_port(inspected: Container) -> int:
    """Return the port on the server's loopback, 0 while none is published."""
    bindings = (inspected.NetworkSettings.Ports or {}).get(f"{_get_inner_port(inspected)}/tcp")
    return int(bindings[0].HostPort) if bindings else 0


def _get_inner_port(inspected: Container) -> int:
    return int(inspected.labels.get("labctl.service-port") or 0)


def _get_socket(inspected: Container) -> str:
    """Return the Unix socket by which a shared server's broker (networks.py) offers the service.

    "" on other servers, which publish a port.
    """
    return inspected.labels.get("labctl.service-socket", "")


def _wait_until_ready(container: str, request: ServiceRequest) -> Container:
    """Wait until the port answers; return the container."""
    name = request.name
    speaks_http = bool(request.test) or (name in KNOWN and not request.command)
    limit_s = request.deadline_s or READY_S
    deadline = time.monotonic() + limit_s
    while True:
        inspected = inspect_container(container)
        if inspected is None or not inspected.State.Running:
            raise _describe_early_end(container, inspected, request)
        address = _get_socket(inspected) or _get_published_port(inspected)
        if address and (is_http_ready(address) if speaks_http else is_listening(address)):
            return inspected
        if time.monotonic() >= deadline:
            raise _make_failure(container, request, f"did not answer within {limit_s:g} s")
        time.sleep(0.2)


def _describe_early_end(
    container: str, inspected: Container | None, request: ServiceRequest
) -> Failure:
    code = inspected.State.ExitCode if inspected else None
    code_text = "" if code is None else f" (exit code {code})"
    failure = _make_failure(container, request, f"exited right after its start{code_text}")
    return serve.explain_failure(code, failure.report.why) if request.model else failure


def _make_failure(container: str, request: ServiceRequest, text: str) -> Failure:
    done = run_docker("logs", "--tail", "20", container, check=False)
    engine.remove_container(container)
    why = (done.stdout + done.stderr).strip()[-2000:] or "it printed nothing"
    arguments = "labctl serve --help   # arguments for the program in the image follow --"
    hint = arguments if request.as_is else f"labctl forward {request.name}   # starts it again"
    return Failure("service", f"the service {request.name} {text}", why, hint)

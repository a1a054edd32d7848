"""Services on the server, started on first use in an image that is extended as needed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from labctl.config import KNOWN_SERVICE_PORTS, find_data_dir
from labctl.errors import BuildError, NotFoundError
from labctl.events import Note, Progress, Reporter, Step
from labctl.model import Service
from labctl.runs.build_output import BuildLines, summarize_build
from labctl.servers.agent import AgentClient
from labctl.text import duration_text
from labctl.wire.runs import DOCKER
from labctl.wire.services import (
    BUILD_SERVICE_IMAGE,
    LIST_SERVICES,
    START_SERVICE,
    STOP_SERVICES,
    ListServicesRequest,
    ServiceRecord,
    ServiceReply,
    ServiceRequest,
    StopServiceRequest,
)

# Longer than the time that the agent waits for a service to answer.
START_TIMEOUT_S = 180.0
# The name of the service whose URL contains a token.
WITH_TOKEN = "jupyter"
# What messages call labctl's own services. The name of the others says what they are.
NAMES = {
    "profile": "the page of the profile",
    "serve": "the model server",
    "serve-model": "the language model",
}
# What `labctl serve` starts; with a number, an image that listens on this port.
_SERVED = re.compile(r"serve(?:-model|-([0-9]{1,5}))?")
SERVED_PORT = 8000
# Services that start side by side need the same image: the first one provides it, the others wait.
_image_lock = threading.Lock()


def ensure_service(
    remote: AgentClient,
    wanted: ServiceRequest,
    reporter: Reporter,
    *,
    provide_image: Callable[[], None] | None = None,
    provide_wheels: Callable[[], None] = lambda: None,
    suggest_wheels: Callable[[Sequence[str]], str] = lambda output: "",
) -> Service:
    """Start the service if needed, and wait until it answers on the server's loopback.

    An unknown service without a command is not labctl's: its port is used as it is, on the server
    or, with an access key, on the machine of a job. `provide_image`
    is called once if the server does not have the image; without it that is a NotFoundError.
    `provide_wheels` is called before the image is extended; BuildError if that fails, with what
    `suggest_wheels` makes of the output. LabError with the container's last output if the service
    does not answer.
    """
    ours = wanted.name in KNOWN_SERVICE_PORTS or wanted.as_is or wanted.model is not None
    if not wanted.command and not ours and not wanted.access_key:
        return Service(name=wanted.name, port=wanted.port)
    name = NAMES.get(wanted.name, wanted.name)
    step = f"starting {name}"
    request = _add_files(wanted)
    timeout_s = START_TIMEOUT_S + wanted.deadline_s
    limit = f"until it answers, at most {duration_text(timeout_s)}"
    reporter.emit(Step(name=step, detail=limit))

    def start() -> ServiceReply:
        return remote.call(START_SERVICE, request, timeout_s=timeout_s)

    def provide_extension() -> None:
        provide_wheels()
        _extend(remote, request, reporter, suggest_wheels)

    reply = start()
    if reply.missing or reply.lacks:
        # The limit does not include what is built first.
        preparing = Progress(name=step, done=0, total=0, unit="steps", detail="preparing its image")
        reporter.emit(preparing)
        reply = _start_with_image(start, reply, wanted.image, provide_image, provide_extension)
    _report_other_settings(reply, name, reporter)
    detail = "already running" if reply.found else ""
    detail = detail or (f"in the job of run {reply.node.run}" if reply.node else "")
    reporter.emit(Step(name=step, done=True, detail=detail))
    return _to_service(reply)


def _start_with_image(
    start: Callable[[], ServiceReply],
    reply: ServiceReply,
    image: str,
    provide_image: Callable[[], None] | None,
    provide_extension: Callable[[], None],
) -> ServiceReply:
    """Provide the image, or what it lacks, and start the service again."""
    with _hold_image_lock() as has_waited:
        reply = start() if has_waited else reply
        if reply.missing and provide_image is not None:
            provide_image()
            reply = start()
        if reply.missing:
            raise NotFoundError(f"the server does not have the image {image}", hint="labctl run")
        if reply.lacks:
            provide_extension()
            reply = start()
    return reply


def _report_other_settings(reply: ServiceReply, name: str, reporter: Reporter) -> None:
    if reply.stale:
        text = f"{name} is running with earlier settings; stop it to apply the new ones"
        reporter.emit(Note(text=text, level="warning"))
    if reply.replaced:
        text = f"stopped {name}, which was running with other settings"
        reporter.emit(Note(text=text))


@contextmanager
def _hold_image_lock() -> Iterator[bool]:
    """Hold the lock for the image; the value is whether another service held it before."""
    has_waited = not _image_lock.acquire(blocking=False)
    if has_waited:
        _image_lock.acquire()
    try:
        yield has_waited
    finally:
        _image_lock.release()


def list_services(
    remote: AgentClient, lab: str, lab_id: str, executor: str = DOCKER
) -> list[Service]:
    """List the lab's services that are running on the server."""
    reply = remote.call(LIST_SERVICES, ListServicesRequest(lab, lab_id, executor))
    return [_to_service(service) for service in reply.services if service.running]


def stop_service(
    remote: AgentClient, lab: str, lab_id: str, name: str = "", executor: str = DOCKER
) -> list[str]:
    """Stop one service, or all of the lab; return the names of those that were running."""
    request = StopServiceRequest(lab, lab_id, name, executor)
    return list(remote.call(STOP_SERVICES, request).stopped)


def is_served(name: str) -> bool:
    """Whether `labctl serve` starts the service of this name, and nothing else does."""
    return _SERVED.fullmatch(name) is not None


def usual_port(name: str, service: Service) -> int:
    """Return the local port that a service usually has."""
    if match := _SERVED.fullmatch(name):
        return int(match[1] or SERVED_PORT)
    return KNOWN_SERVICE_PORTS.get(name, service.port)


def find_served(remote: AgentClient, lab: str, lab_id: str, name: str) -> Service:
    """Find what `labctl serve` has started; NotFoundError if it does not run."""
    services = list_services(remote, lab, lab_id)
    if (found := next((one for one in services if one.name == name), None)) is None:
        raise NotFoundError(
            f"{NAMES.get(name, name)} is not running on the server",
            why="labctl forward does not start it",
            hint="labctl serve --help",
        )
    return found


def _to_service(reply: ServiceReply | ServiceRecord) -> Service:
    return Service(
        name=reply.name,
        port=reply.port,
        token=reply.token,
        path=reply.path,
        container=reply.container,
        socket=reply.socket,
        node=reply.node if isinstance(reply, ServiceReply) else None,
    )


def _add_files(wanted: ServiceRequest) -> ServiceRequest:
    """Add labctl's own files that the service may need to the request."""
    dockerfile = find_data_dir() / "images" / "services" / "Dockerfile"
    return wanted._replace(
        dockerfile=dockerfile.read_text(encoding="utf-8"),
        app=serving_files() if wanted.model else {},
    )


def serving_files() -> dict[str, str]:
    """Return the files of the model server, as they are sent to a server: name -> text.

    Its packages have the same layout there, in a package of another name.
    """
    package = Path(__file__).parents[1]
    paths = [
        path
        for folder in ("services/model_server", "wire")
        for path in sorted((package / folder).glob("*.py"))
    ]
    texts = {str(path.relative_to(package)): path.read_text(encoding="utf-8") for path in paths}
    return {"__init__.py": "", "services/__init__.py": "", **texts}


def _extend(
    remote: AgentClient,
    wanted: ServiceRequest,
    reporter: Reporter,
    suggest_wheels: Callable[[Sequence[str]], str],
) -> None:
    """Build an image that adds the service's programs to the lab's image."""
    what = "the serving dependencies" if wanted.model else "TensorBoard and Jupyter"
    what = wanted.args.get("PACKAGES", what) if wanted.test else what
    what = "MLflow" if wanted.name == "mlflow" else what
    name = f"installing {what} in {wanted.image}"
    reporter.emit(Step(name=name))
    closing = remote.stream(
        BUILD_SERVICE_IMAGE,
        wanted,
        on_reply=lambda _: None,
        on_bytes=BuildLines(reporter, name).feed,
    )
    if closing.code != 0:
        show_log = f"labctl ssh -- cat {closing.log}   # the full log"
        raise BuildError(
            f"cannot install {wanted.name}, which {wanted.image} lacks",
            log_path=closing.log,
            why=summarize_build(closing.tail),
            hint="\n".join(filter(None, [suggest_wheels(closing.tail), show_log])),
        )
    reporter.emit(Step(name=name, done=True))

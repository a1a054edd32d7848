"""Services on the server, started on first use in an image that is extended as needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from labctl.config import KNOWN_SERVICE_PORTS, find_data_dir
from labctl.errors import BuildError, NotFoundError
from labctl.events import Note, Reporter, Step
from labctl.model import Service, Value
from labctl.runs.build_output import BuildLines
from labctl.servers.agent import AgentClient

# Longer than the time that the agent waits for a service to answer.
START_TIMEOUT_S = 180.0


class ServedModel(Value, frozen=True, kw_only=True):
    """The model that labctl's own server program serves.

    `where` is "run" (the run's files on this server) or "here" (a pulled copy, sent back), `code`
    is "run" (the run's own) or "lab" (what was pushed last). `checkpoint` is one of the run's
    checkpoints, "" for all of them.
    """

    run: str
    where: str = "run"
    code: str = "run"
    checkpoint: str = ""


class ServiceRequest(Value, frozen=True, kw_only=True):
    """A requested service. `command` is argv in the container, () for services known to labctl.

    `port` is its port in the container, 0 for a known service's usual one. `args` and `wheelhouse`
    are for building an image with its programs, if needed. With `as_is`, the image's own entrypoint
    runs, followed by `command`. A running service with other settings is kept, unless `replace`
    is set. The limits apply to a `model` and to `as_is`; 0 means no limit.
    """

    lab: str
    lab_id: str
    name: str
    image: str
    command: tuple[str, ...] = ()
    port: int = 0
    gpus: str = ""
    args: dict[str, str] = msgspec.field(default_factory=dict)
    wheelhouse: bool = False
    env: dict[str, str] = msgspec.field(default_factory=dict)
    model: ServedModel | None = None
    as_is: bool = False
    replace: bool = False
    deadline_s: float = 0.0
    memory_bytes: int = 0
    cpus: float = 0.0
    shm_bytes: int = 0


def ensure_service(
    remote: AgentClient,
    wanted: ServiceRequest,
    reporter: Reporter,
    *,
    provide_image: Callable[[], None] | None = None,
    provide_wheels: Callable[[], None] = lambda: None,
) -> Service:
    """Start the service if needed, and wait until it answers on the server's loopback.

    An unknown service without a command is not labctl's: its port is used as it is. `provide_image`
    is called once if the server does not have the image; without it that is a NotFoundError.
    `provide_wheels` is called before the image is extended; BuildError if that fails. LabError with
    the container's last output if the service does not answer.
    """
    ours = wanted.name in KNOWN_SERVICE_PORTS or wanted.as_is or wanted.model is not None
    if not wanted.command and not ours:
        return Service(name=wanted.name, port=wanted.port)
    step = f"starting {wanted.name}"
    reporter.emit(Step(name=step))
    reply = _call(remote, wanted)
    if "missing" in reply and provide_image is not None:
        provide_image()
        reply = _call(remote, wanted)
    if "missing" in reply:
        raise NotFoundError(f"the server does not have the image {wanted.image}", hint="labctl run")
    if "lacks" in reply:
        provide_wheels()
        _extend(remote, wanted, reporter)
        reply = _call(remote, wanted)
    if reply.get("stale"):
        text = f"{wanted.name} is running with earlier settings; stop it to apply the new ones"
        reporter.emit(Note(text=text, level="warning"))
    if reply.get("replaced"):
        text = f"stopped the running {wanted.name}, which had other settings"
        reporter.emit(Note(text=text))
    detail = f"{wanted.name} is already running" if reply["found"] else ""
    reporter.emit(Step(name=step, done=True, detail=detail))
    return _to_service(reply)


def list_services(remote: AgentClient, lab: str, lab_id: str) -> list[Service]:
    """List the lab's services that are running on the server."""
    reply = remote.call_untyped("services", {"lab": lab, "lab_id": lab_id})
    return [_to_service(service) for service in reply["services"] if service["running"]]


def stop_service(remote: AgentClient, lab: str, lab_id: str, name: str = "") -> list[str]:
    """Stop one service, or all of the lab; return the names of those that were running."""
    reply = remote.call_untyped("service-stop", {"lab": lab, "lab_id": lab_id, "name": name})
    return list(reply["stopped"])


def usual_port(name: str, service: Service) -> int:
    """Return the local port that a service usually has."""
    return KNOWN_SERVICE_PORTS.get(name, service.port)


def _to_service(reply: dict[str, Any]) -> Service:
    return msgspec.convert({k: reply[k] for k in Service.__struct_fields__ if k in reply}, Service)


def _build_request(wanted: ServiceRequest) -> dict[str, Any]:
    dockerfile = (find_data_dir() / "images" / "services" / "Dockerfile").read_text(
        encoding="utf-8"
    )
    body = {**msgspec.to_builtins(wanted), "dockerfile": dockerfile}
    return {**body, "app": serving_files()} if wanted.model else body


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


def _call(remote: AgentClient, wanted: ServiceRequest) -> dict[str, Any]:
    timeout_s = START_TIMEOUT_S + wanted.deadline_s
    return remote.call_untyped("service", _build_request(wanted), timeout_s=timeout_s)


def _extend(remote: AgentClient, wanted: ServiceRequest, reporter: Reporter) -> None:
    """Build an image that adds the service's programs to the lab's image."""
    what = "the serving dependencies" if wanted.model else "TensorBoard and Jupyter"
    name = f"installing {what} in {wanted.image}"
    reporter.emit(Step(name=name))
    closing = remote.stream_untyped(
        "service-image",
        _build_request(wanted),
        on_reply=lambda _: None,
        on_bytes=BuildLines(reporter, name).feed,
    )
    if closing["code"] != 0:
        raise BuildError(
            f"cannot install {wanted.name}, which {wanted.image} lacks",
            log_path=closing["log"],
            why="\n".join(closing["tail"]),
            hint=f"install it in the lab's image; the log: labctl ssh -- cat {closing['log']}",
        )
    reporter.emit(Step(name=name, done=True))

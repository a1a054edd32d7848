"""Services on the server: started on first use, found when they run, their image extended once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from labctl.config import KNOWN_SERVICE_PORTS, data_dir
from labctl.errors import BuildError, NotFoundError
from labctl.events import Note, Reporter, Step
from labctl.model import Service, Value
from labctl.runs.build_output import BuildLines
from labctl.servers.agent import Remote

# Above the time that the server gives a service to answer.
START_TIMEOUT_S = 180.0


class ServedModel(Value, frozen=True, kw_only=True):
    """Which model labctl's own server program serves.

    `where` is "run" (what the run left on this server) or "here" (what was pulled, sent back),
    `code` "run" (the run's own) or "lab" (what was pushed last). `checkpoint` is below the run's
    checkpoints, "" for all of them.
    """

    run: str
    where: str = "run"
    code: str = "run"
    checkpoint: str = ""


class ServiceRequest(Value, frozen=True, kw_only=True):
    """A service as wanted. `command` is argv in the container, () for what labctl knows.

    `port` is the one it listens on in its container, 0 for a known one's usual. `args` and
    `wheelhouse` are for building the image that adds its programs, should it be needed. With
    `as_is` the image's own entrypoint runs, `command` behind it. One that runs with other settings
    stays, unless `replace` ends it. The limits are for a `model` and for `as_is`; 0 is none.
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
    remote: Remote,
    wanted: ServiceRequest,
    reporter: Reporter,
    *,
    provide_image: Callable[[], None] | None = None,
    provide_wheels: Callable[[], None] = lambda: None,
) -> Service:
    """The service, running and answering on the server's loopback.

    One without a command that labctl does not know is somebody else's: its port is taken as it
    is. `provide_image` is called once when the image is not on the server; without it that is a
    NotFoundError. `provide_wheels` is called before the image is extended; BuildError where that
    cannot be done. LabError with the container's last words where the service does not answer.
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
        raise NotFoundError(f"the image {wanted.image} is not on the server", hint="labctl run")
    if "lacks" in reply:
        provide_wheels()
        _extend(remote, wanted, reporter)
        reply = _call(remote, wanted)
    if reply.get("stale"):
        told = f"{wanted.name} runs with earlier settings; stop it to have it started with these"
        reporter.emit(Note(text=told, level="warning"))
    if reply.get("replaced"):
        reporter.emit(Note(text=f"the {wanted.name} that ran with other settings was ended"))
    reporter.emit(Step(name=step, done=True, detail="it ran already" if reply["found"] else ""))
    return _service(reply)


def services(remote: Remote, lab: str, lab_id: str) -> list[Service]:
    """The lab's services that run on the server."""
    reply = remote.call("services", {"lab": lab, "lab_id": lab_id})
    return [_service(one) for one in reply["services"] if one["running"]]


def stop_service(remote: Remote, lab: str, lab_id: str, name: str = "") -> list[str]:
    """Stop one service, or all of the lab; the names of those that were there."""
    reply = remote.call("service-stop", {"lab": lab, "lab_id": lab_id, "name": name})
    return list(reply["stopped"])


def usual_port(name: str, service: Service) -> int:
    """The local port that people expect a service at."""
    return KNOWN_SERVICE_PORTS.get(name, service.port)


def _service(told: dict[str, Any]) -> Service:
    return msgspec.convert({k: told[k] for k in Service.__struct_fields__ if k in told}, Service)


def _request(wanted: ServiceRequest) -> dict[str, Any]:
    dockerfile = (data_dir() / "images" / "services" / "Dockerfile").read_text(encoding="utf-8")
    body = {**msgspec.to_builtins(wanted), "dockerfile": dockerfile}
    return {**body, "app": serving_files()} if wanted.model else body


def serving_files() -> dict[str, str]:
    """labctl's server program for models, as it goes to a server: name -> text.

    Its rooms stand beside each other there as they do here, in a package of another name.
    """
    home = Path(__file__).parents[1]
    paths = [
        path
        for room in ("services/model_server", "wire")
        for path in sorted((home / room).glob("*.py"))
    ]
    texts = {str(path.relative_to(home)): path.read_text(encoding="utf-8") for path in paths}
    return {"__init__.py": "", "services/__init__.py": "", **texts}


def _call(remote: Remote, wanted: ServiceRequest) -> dict[str, Any]:
    timeout_s = START_TIMEOUT_S + wanted.deadline_s
    return remote.call("service", _request(wanted), timeout_s=timeout_s)


def _extend(remote: Remote, wanted: ServiceRequest, reporter: Reporter) -> None:
    """Build the image that has the programs which the lab's own lacks."""
    what = "what serves a model" if wanted.model else "TensorBoard and Jupyter"
    name = f"adding {what} to {wanted.image}"
    reporter.emit(Step(name=name))
    closing = remote.stream(
        "service-image",
        _request(wanted),
        on_reply=lambda _: None,
        on_bytes=BuildLines(reporter, name).feed,
    )
    if closing["code"] != 0:
        raise BuildError(
            f"{wanted.image} lacks {wanted.name}, and it could not be added",
            log_path=closing["log"],
            why="\n".join(closing["tail"]),
            hint=f"install it in the lab's own image; the log: labctl ssh -- cat {closing['log']}",
        )
    reporter.emit(Step(name=name, done=True))

"""What labctl sends for a service, and what it makes of the replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from labctl.errors import BuildError, NotFoundError
from labctl.events import Note, SilentReporter, Step
from labctl.model import Endpoint, Service
from labctl.services.background_forwards import BackgroundForwardSpec
from labctl.services.port_forward import ForwardSpec
from labctl.services.services import ensure_service, list_services, serving_files, stop_service
from labctl.wire.codec import decode, encode
from labctl.wire.images import BuildResult
from labctl.wire.services import (
    BUILD_SERVICE_IMAGE,
    LIST_SERVICES,
    START_SERVICE,
    STOP_SERVICES,
    ListServicesReply,
    ListServicesRequest,
    ServedModel,
    ServiceImageOpening,
    ServiceRecord,
    ServiceReply,
    ServiceRequest,
    StopServiceReply,
    StopServiceRequest,
)

WEB = ServiceRequest("digits", "0f1e", "web", "digits:1", command=("python", "app.py"), port=80)
STARTED = ServiceReply("web", 40001, container="digits-svc-web", running=True)
SERVICE = Service(name="web", port=40001, container="digits-svc-web")


class Agent:
    """The agent: it gets messages as they are on the wire, and sends `replies` in their order."""

    def __init__(self, *replies: NamedTuple) -> None:
        self.replies = list(replies)
        self.requests: list[Any] = []

    def call(self, verb: Any, request: Any, *, timeout_s: float = 0.0) -> Any:
        self.requests.append((verb, decode(verb.request, encode(request))))
        return decode(verb.reply, encode(self.replies.pop(0)))

    def stream(
        self, verb: Any, request: Any, *, on_reply: Callable[[Any], None], on_bytes: object
    ) -> Any:
        on_reply(decode(verb.opening, encode(ServiceImageOpening("build.log", "image:2"))))
        self.requests.append((verb, request))
        return decode(verb.closing, encode(self.replies.pop(0)))


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.steps: list[Step] = []

    def emit(self, event: object) -> None:
        if isinstance(event, Note):
            self.texts.append(event.text)
        if isinstance(event, Step):
            self.steps.append(event)


def ensure(agent: Agent, wanted: ServiceRequest = WEB, **more: Any) -> tuple[Service, list[str]]:
    notes = Notes()
    remote: Any = agent
    return ensure_service(remote, wanted, notes, **more), notes.texts


def test_a_service_is_started_with_labctls_own_files() -> None:
    agent = Agent(STARTED)
    assert ensure(agent) == (SERVICE, [])
    ((verb, request),) = agent.requests
    assert verb is START_SERVICE
    assert request._replace(dockerfile="") == WEB
    assert "FROM" in request.dockerfile
    model = WEB._replace(name="serve", model=ServedModel("night"), command=())
    agent = Agent(STARTED)
    ensure(agent, model)
    assert agent.requests[0][1].app == serving_files()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("web", "starting web"),
        ("profile", "starting the page of the profile"),
        ("serve", "starting the model server"),
    ],
)
def test_a_start_says_what_it_waits_for(name: str, step: str) -> None:
    notes = Notes()
    remote: Any = Agent(STARTED)
    ensure_service(remote, WEB._replace(name=name), notes)
    limit = "until it answers, at most 3 min"
    assert notes.steps == [Step(name=step, detail=limit), Step(name=step, done=True)]


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        (STARTED._replace(found=True, stale=True), "is running with earlier settings"),
        (STARTED._replace(replaced=True), "stopped web, which was running"),
    ],
)
def test_other_settings_are_reported(reply: ServiceReply, note: str) -> None:
    service, notes = ensure(Agent(reply))
    assert service == SERVICE
    assert note in notes[0]


def test_a_missing_image_is_provided_once() -> None:
    provided: list[str] = []
    missing = ServiceReply(missing="digits:1")
    service, _ = ensure(Agent(missing, STARTED), provide_image=lambda: provided.append("image"))
    assert (service, provided) == (SERVICE, ["image"])
    for provide in (None, lambda: None):
        with pytest.raises(NotFoundError, match="does not have the image digits:1"):
            ensure(Agent(missing, missing), provide_image=provide)


def test_an_image_is_extended_with_what_it_lacks() -> None:
    lacks = ServiceReply(lacks="web", tag="image:2")
    agent = Agent(lacks, BuildResult(0, (), "build.log"), STARTED)
    assert ensure(agent)[0] == SERVICE
    assert [verb for verb, _ in agent.requests] == [
        START_SERVICE, BUILD_SERVICE_IMAGE, START_SERVICE
    ]  # fmt: skip
    with pytest.raises(BuildError, match="cannot install web") as failed:
        ensure(Agent(lacks, BuildResult(1, ("no", "space"), "build.log")))
    assert (failed.value.why, failed.value.log_path) == ("no\nspace", "build.log")


def test_running_services_are_listed_and_stopped() -> None:
    web = ServiceRecord("web", 40001, "", "", "/", "digits-svc-web", running=True)
    ended = web._replace(name="old", port=0, running=False)
    agent = Agent(ListServicesReply((ended, web)), StopServiceReply(("web",)))
    remote: Any = agent
    assert list_services(remote, "digits", "0f1e") == [SERVICE]
    assert stop_service(remote, "digits", "0f1e", "web") == ["web"]
    assert agent.requests == [
        (LIST_SERVICES, ListServicesRequest("digits", "0f1e")),
        (STOP_SERVICES, StopServiceRequest("digits", "0f1e", "web")),
    ]


def test_a_background_forward_gets_its_request_unchanged() -> None:
    request = WEB._replace(model=ServedModel("night", code="lab"), env={"A": "b"}, cpus=1.5)
    forward = ForwardSpec(
        config="c", server_id="box-1", endpoint=Endpoint(host="h"), service=SERVICE
    )
    for each in (request, WEB, None):
        spec = BackgroundForwardSpec(forward=forward, log_path="l", request=each)
        assert msgspec.json.decode(msgspec.json.encode(spec), type=BackgroundForwardSpec) == spec

"""Two labs of one user build the same image at once, each on a server of this machine.

One builds, and the other waits and loads what the first has built. The locks are real.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from image_engines import BUILT, Sources, make_sources
from lab_world import Recorded, World
from test_run_start import Turn, Wire

from labctl.config import load_lab
from labctl.events import Progress, Step
from labctl.lifecycle import up
from labctl.model import ServerFacts
from labctl.runs import image_jobs, images
from labctl.servers.context import LabContext
from labctl.state import State

FAILED = Turn({"log": "/x"}, end={"code": 1, "tail": ["E: no package"], "log": "/x"})


@pytest.fixture
def sources(lab: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    return make_sources(lab, tmp_path, monkeypatch)


@dataclass
class BuildingWire(Wire):
    """A server whose build calls `on_build` before it ends."""

    on_build: Callable[[], None] = lambda: None

    def _next(self, line: str, stdin: bytes) -> Turn:
        turn = super()._next(line, stdin)
        if line.split()[-1] == "build":
            self.on_build()
        return turn


class SecondLab:
    """Another lab with the same Dockerfile, and its server."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.reporter = Recorded()
        self.root = sources.lab.home / "second"
        self.root.mkdir()
        (self.root / "Dockerfile").write_text("FROM scratch\n")
        (self.root / "lab.yaml").write_text("lab: second\nimage: {build: .}\n")
        self.server = up.up(self.context())
        self.context().save_facts(self.server, ServerFacts(arch="x86_64"))
        assert images.image_reference(self.context()) == sources.wanted

    def context(self) -> LabContext:
        lab = self.sources.lab
        config = load_lab(self.root, environ={"HOME": str(lab.home)})
        state = State(lab.places.database)
        context = LabContext(config, "5ec0d1ab5ec0", lab.places, state, self.reporter)
        context.__dict__["provider"] = lab.cloud
        context.__dict__["connections"] = lab.context().connections
        return context

    def ensure(self, *turns: Turn) -> list[str]:
        """Ensure the image; return the agent's verbs after the one that finds it absent."""
        wire = Wire([Turn({"ids": {self.sources.wanted: ""}}), *turns])
        context = self.context()
        context.connections.__dict__["machine"] = wire
        remote = context.open_agent(self.server)
        images.ensure_image(context, self.server, remote, self.sources.wanted)
        assert wire.turns == []
        return [verb for verb, _ in wire.asked[1:]]


def build_at_once(sources: Sources, build: Turn, second: SecondLab, *turns: Turn) -> list[str]:
    """Build in the first lab, and end only when the second shows that; return its verbs."""
    sources.is_on_this_machine = True
    sources.lab.cloud.on_this_machine = True  # type: ignore[attr-defined]
    (sources.engine / "there").write_text("2048 amd64\n")
    building, waiting = threading.Event(), threading.Event()
    shown: list[str] = []

    def on_build() -> None:
        building.set()
        assert waiting.wait(30)

    def on_event(event: object) -> None:
        if isinstance(event, Progress) and event.name == "waiting for the other command":
            shown.append(event.detail)
            waiting.set()

    second.reporter.on_event = on_event
    wire = BuildingWire([Turn({"ids": {sources.wanted: ""}}), build], on_build=on_build)
    with ThreadPoolExecutor() as threads:
        context = sources.context(wire)
        agent = context.open_agent(sources.server)
        first = threads.submit(images.ensure_image, context, sources.server, agent, sources.wanted)
        assert building.wait(30)
        verbs = threads.submit(second.ensure, *turns)
        verbs.add_done_callback(lambda _: waiting.set())
    second_verbs = verbs.result()
    steps = [one for one in second.reporter.events if isinstance(one, Step)]
    waits = [one.done for one in steps if one.name == "waiting for the other command"]
    assert waits == [False, True], "a person sees that it waits"
    assert "waiting for it to finish" in second.reporter.said
    assert shown[0] == "building the image", "and sees what the other command does"
    assert bool(first.exception()) == (build is FAILED)
    assert wire.turns == []
    return second_verbs


def test_of_two_labs_that_build_at_once_the_second_loads_what_the_first_built(
    sources: Sources,
) -> None:
    second = SecondLab(sources)
    assert build_at_once(sources, BUILT, second) == []
    assert f"building the image {sources.wanted}" in second.reporter.said
    assert (sources.engine / "loaded").read_bytes() == sources.archive
    assert sources.cache.take_failures() == []


def test_the_second_builds_if_the_build_of_the_first_fails(sources: Sources) -> None:
    assert build_at_once(sources, FAILED, SecondLab(sources), BUILT) == ["build"]
    image_jobs.wait_for_save(sources.context(), sources.wanted)
    assert sources.cache.find(sources.wanted)


def test_the_second_builds_if_the_image_of_the_first_was_not_kept(sources: Sources) -> None:
    (sources.engine / "save-fails").touch()
    assert build_at_once(sources, BUILT, SecondLab(sources), BUILT) == ["build"]
    assert not (sources.engine / "loaded").exists()


def test_the_second_builds_if_its_server_does_not_load_the_archive(sources: Sources) -> None:
    (sources.engine / "full").touch()
    second = SecondLab(sources)
    assert build_at_once(sources, BUILT, second, BUILT) == ["build"]
    failure = "`docker load` on the server ended with exit code 1: no space left on device"
    assert failure in second.reporter.said

"""Faults while an image is built, kept, loaded, pulled or pushed.

Nothing half-made is used, nothing good is lost, and the message says what to type.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from image_engines import BUILT, Sources, cut, make_archive, make_sources, wait_for
from lab_world import Recorded, World
from test_run_start import Turn, Wire

from labctl.config import load_lab
from labctl.errors import DiskFullError, LinkLostError, TransferError
from labctl.lifecycle import up
from labctl.model import ServerFacts
from labctl.runs import image_cache, image_jobs, image_sources, images
from labctl.servers.context import LabContext
from labctl.state import State

MIB = 1 << 20
FAILED = Turn({"log": "/x"}, end={"code": 1, "tail": ["E: no package"], "log": "/x"})
# What 'docker push' says to a server without a login.
DENIED = "denied: login required"


@pytest.fixture
def sources(lab: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    return make_sources(lab, tmp_path, monkeypatch)


@pytest.fixture
def large(sources: Sources) -> Sources:
    """An archive that does not fit into the pipes between labctl and the server's engine."""
    sources.archive = make_archive(sources.wanted, layers=(os.urandom(8 * MIB),))
    (sources.engine / "archive").write_bytes(sources.archive)
    return sources


# Two labs of one user, each with a server on this machine.


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
    """Build in the first lab, and end only when the second waits; return the second's verbs."""
    sources.is_on_this_machine = True
    sources.lab.cloud.on_this_machine = True  # type: ignore[attr-defined]
    (sources.engine / "there").write_text("2048 amd64\n")
    building, waiting = threading.Event(), threading.Event()

    def on_build() -> None:
        building.set()
        assert waiting.wait(30)

    def on_event(_event: object) -> None:
        if "waiting for it to finish" in second.reporter.said:
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
    assert bool(first.exception()) == (build is FAILED)
    assert wire.turns == []
    return second_verbs


def test_of_two_labs_that_build_at_once_the_second_loads_what_the_first_built(
    sources: Sources,
) -> None:
    second = SecondLab(sources)
    assert build_at_once(sources, BUILT, second) == []
    assert f"build {sources.wanted}" in second.reporter.said
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
    assert "the server did not load the image: no space left on device" in second.reporter.said


# While an archive is loaded.


@pytest.fixture
def during_load(large: Sources) -> Callable[..., list[str]]:
    """Change the archive after the server has read a part of it."""
    (large.engine / "pauses").touch()

    def load(change: Callable[[Path], object], *turns: Turn) -> list[str]:
        path = large.cache.path(large.keep())
        with ThreadPoolExecutor() as threads:
            verbs = threads.submit(large.ensure, *turns)
            wait_for((large.engine / "begun").exists)
            change(path)
            (large.engine / "go").touch()
        return verbs.result()

    return load


def test_an_archive_that_is_removed_while_it_loads_is_loaded(
    large: Sources, during_load: Callable[..., list[str]]
) -> None:
    assert during_load(Path.unlink) == []
    loaded = (large.engine / "begun").read_bytes() + (large.engine / "loaded").read_bytes()
    assert loaded == large.archive


def test_an_archive_that_is_cut_while_it_loads_is_not_used(
    large: Sources, during_load: Callable[..., list[str]]
) -> None:
    assert during_load(lambda path: os.truncate(path, 5 * MIB), BUILT) == ["build"]
    loaded = (large.engine / "begun").read_bytes() + (large.engine / "loaded").read_bytes()
    assert 0 < len(loaded) < 5 * MIB
    assert "is damaged: its SHA-256 hash differs from its record" in large.reporter.said
    assert not list(large.cache.directory.glob("*.tar"))


def test_a_link_that_is_lost_while_an_archive_loads_loses_nothing(large: Sources) -> None:
    kept = large.keep()
    (large.engine / "ends-early").touch()
    with pytest.raises(LinkLostError, match="lost the connection to the server") as caught:
        large.ensure()
    assert caught.value.hint == "labctl status --refresh, then labctl up"
    assert (large.engine / "loaded").stat().st_size == 1_000_000
    assert large.cache.find(large.wanted) == kept
    (large.engine / "ends-early").unlink()
    assert large.ensure() == []
    assert (large.engine / "loaded").read_bytes() == large.archive


def test_a_load_in_advance_that_loses_the_link_is_silent_and_keeps_the_archive(
    large: Sources,
) -> None:
    kept = large.keep()
    (large.engine / "ends-early").touch()
    up.up(large.context())
    wait_for((large.engine / "loaded").exists)
    lock = images.lock_name(large.server, large.wanted)
    with large.context().state.lock(lock, "test", wait_s=30):
        assert large.cache.find(large.wanted) == kept
    assert large.cache.take_failures() == []


# The engine of this machine.


def test_an_image_for_another_architecture_is_not_sent_from_this_machine(sources: Sources) -> None:
    (sources.engine / "here").write_text("2048 arm64\n")
    assert sources.ensure(BUILT) == ["build"]
    text = f"{sources.wanted} on this machine is for arm64; the server is amd64"
    assert text in sources.reporter.said
    assert not [call for call in sources.calls if call.startswith("here save")]


def test_a_server_that_refuses_an_image_from_this_machine_builds_it(sources: Sources) -> None:
    (sources.engine / "here").write_text("2048 amd64\n")
    (sources.engine / "full").touch()
    assert sources.ensure(BUILT) == ["build"]
    text = (
        f"cannot send {sources.wanted} to the server: "
        "the server did not load the image: no space left on device"
    )
    assert text in sources.reporter.said


def test_an_image_that_this_machine_cannot_save_is_built(sources: Sources) -> None:
    (sources.engine / "here").write_text("2048 amd64\n")
    (sources.engine / "save-fails").touch()
    assert sources.ensure(BUILT) == ["build"]
    assert "`docker save` ended with exit code 1: no layer" in sources.reporter.said


def test_an_image_that_only_this_machine_has_cannot_be_built(sources: Sources) -> None:
    (sources.engine / "here").write_text("2048 amd64\n")
    (sources.engine / "full").touch()
    context = sources.context(Wire([]))
    agent = context.open_agent(sources.server)
    with pytest.raises(TransferError, match="cannot send mine:1 to the server") as caught:
        image_sources.provide_image(context, sources.server, agent, "mine:1")
    assert caught.value.why.endswith("no space left on device")
    assert caught.value.hint == "labctl doctor"


# What the next `labctl up` says of a failure in the background.


def report(sources: Sources) -> str:
    """Return what `labctl up` says, once the job has ended."""
    wait_for(lambda: list(sources.cache.directory.glob("*.error")))
    up.up(sources.context())
    return sources.reporter.said


def test_a_registry_that_refuses_a_push_is_reported_with_the_commands(sources: Sources) -> None:
    sources.name_registry()
    (sources.engine / "there").write_text("2048 amd64\n")
    (sources.engine / "denied").touch()
    assert sources.ensure(Turn({}, end={"code": 1, "tail": [DENIED]}), BUILT)[-1] == "build"
    reference = f"registry.example/labs:{sources.tag}-amd64"
    assert (
        f"{sources.wanted} was not pushed to registry.example/labs: "
        f"the server could not push it ({DENIED}); "
        "next: labctl ssh -- docker login registry.example; "
        f"then labctl ssh -- docker push {reference}"
    ) in report(sources).splitlines()


def test_a_registry_that_refuses_a_pull_is_reported_with_the_command(sources: Sources) -> None:
    sources.name_registry()
    assert sources.ensure(Turn({}, end={"code": 1, "tail": [DENIED]}), BUILT)[-1] == "build"
    reference = f"registry.example/labs:{sources.tag}-amd64"
    assert (
        f"the server could not pull {reference}: {DENIED}; "
        "if the registry needs a login: labctl ssh -- docker login registry.example"
    ) in sources.reporter.said.splitlines()


def test_an_image_that_cannot_be_kept_is_pushed_nevertheless(sources: Sources) -> None:
    sources.name_registry()
    sources.is_on_this_machine = True
    (sources.engine / "there").write_text("2048 amd64\n")
    (sources.engine / "save-fails").touch()
    assert sources.ensure(Turn({}, end={"code": 1, "tail": [DENIED]}), BUILT)[-1] == "build"
    assert (
        f"{sources.wanted} was not kept on this machine: `docker save` ended with exit code 1 "
        "(no layer); labctl tries it again after the next build"
    ) in report(sources).splitlines()
    assert [call for call in sources.calls if call.startswith("yes push")]


def test_a_server_that_is_gone_is_reported_with_the_command(sources: Sources) -> None:
    sources.is_on_this_machine = True
    (sources.engine / "dead").touch()
    assert sources.ensure(BUILT) == ["build"]
    assert (
        f"{sources.wanted} was not kept on this machine: lost the connection to the server; "
        "next: labctl status --refresh"
    ) in report(sources).splitlines()


# A full disk.


@pytest.fixture
def small_disk(sources: Sources) -> Iterator[Path]:
    """The directory of the archives is a disk of 16 MiB."""
    place = sources.cache.directory
    place.mkdir(parents=True)
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    line = ["mount", "-t", "tmpfs", "-o", f"size=16m,mode=700,uid={os.geteuid()}"]
    subprocess.run([*sudo, *line, "labctl-test", str(place)], check=True)
    yield place
    subprocess.run([*sudo, "umount", str(place)], check=True)


def test_a_disk_without_room_is_reported_with_what_to_do(
    sources: Sources, small_disk: Path
) -> None:
    (sources.engine / "there").write_text("2048 amd64\n")
    sources.is_on_this_machine = True
    assert sources.ensure(BUILT) == ["build"]
    assert (
        f"{sources.wanted} was not kept on this machine: {small_disk} has no room for 2.1 KiB "
        "(the limit is 18.6 GiB, and 1.9 GiB of the disk must stay free); "
        "next: set image_cache in config.yaml, or free disk space"
    ) in report(sources).splitlines()
    assert not list(small_disk.glob("*.part"))


def test_a_disk_that_fills_up_meanwhile_keeps_the_earlier_archives(
    large: Sources, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_cache, "RESERVE_BYTES", 0)
    kept, other = large.keep(), "labctl/built:fedcba9876543210"
    second = make_archive(other, layers=(os.urandom(8 * MIB),))
    with pytest.raises(DiskFullError, match=r"has no room|cannot write"):
        large.cache.add(other, "amd64", cut(second))
    assert large.cache.list_images() == [kept]
    assert large.ensure() == []
    assert (large.engine / "loaded").read_bytes() == large.archive
    large.cache.make_room(10 * MIB)
    assert large.cache.add(other, "amd64", cut(second)) in large.cache.list_images()

"""Faults while an image is built, kept, loaded, pulled or pushed.

Nothing half-made is used, nothing good is lost, and the message says what to type.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from image_engines import BUILT, Sources, cut, make_archive, make_sources, wait_for
from lab_world import World
from test_run_start import Turn, Wire

from labctl.errors import DiskFullError, LinkLostError, TransferError
from labctl.lifecycle import up
from labctl.parallel import run_parts
from labctl.runs import image_cache, image_sources, images

MIB = 1 << 20
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
    assert caught.value.hint == "labctl status --refresh\nlabctl up"
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
        "`docker load` on the server ended with exit code 1: no space left on device"
    )
    assert text in sources.reporter.said


@pytest.mark.parametrize("source", ["engine", "cache"])
def test_data_that_cannot_be_sent_is_not_blamed_on_the_image(large: Sources, source: str) -> None:
    if source == "cache":
        large.keep()
    else:
        (large.engine / "here").write_text(f"{len(large.archive)} amd64\n")
    (large.engine / "pauses").touch()

    def fail_to_send() -> None:
        wait_for((large.engine / "begun").exists)
        raise TransferError("the data could not be sent")

    with pytest.raises(TransferError, match="the data could not be sent"):
        run_parts({"image": large.ensure, "data": fail_to_send})
    assert "docker load" not in large.reporter.said
    assert "cannot send" not in large.reporter.said


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
        f"the server could not push it ({DENIED})\n"
        "  next: labctl ssh -- docker login registry.example\n"
        f"        labctl ssh -- docker push {reference}\n"
    ) in report(sources) + "\n"


def test_a_registry_that_refuses_a_pull_is_reported_with_the_command(sources: Sources) -> None:
    sources.name_registry()
    assert sources.ensure(Turn({}, end={"code": 1, "tail": [DENIED]}), BUILT)[-1] == "build"
    assert (
        f"registry.example/labs gave the server no {sources.tag}-amd64, so it builds it: {DENIED}\n"
        "  next: labctl ssh -- docker login registry.example\n"
        "        (if the registry needs a login)\n"
    ) in sources.reporter.said + "\n"


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


@pytest.mark.parametrize("signs", [("dead",), ("save-fails", "stopped")])
def test_a_server_that_ends_during_the_copy_is_named_as_the_reason(
    sources: Sources, signs: tuple[str, ...]
) -> None:
    """Its engine may end before its sshd: then `docker save` fails, and ssh does not."""
    sources.is_on_this_machine = True
    (sources.engine / "there").write_text("2048 amd64\n")
    for sign in signs:
        (sources.engine / sign).touch()
    assert sources.ensure(BUILT) == ["build"]
    assert (
        f"{sources.wanted} was not kept on this machine: its server was stopped or removed before "
        "the copy was complete; labctl tries it again after the next build"
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
        "(the limit is 18.6 GiB, and 1.9 GiB of the disk must stay free)\n"
        "  next: set image_cache in config.yaml, or free disk space\n"
    ) in report(sources) + "\n"
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

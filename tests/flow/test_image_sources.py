"""A built image comes from the nearest place that has it; this machine keeps a server's builds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from image_engines import BUILT, PULLED, Sources, make_sources, wait_for
from lab_world import World
from test_run_start import Turn, Wire

from labctl.errors import LinkLostError
from labctl.events import Step
from labctl.lifecycle import up
from labctl.model import ServerFacts
from labctl.runs import image_jobs, images, stored_images
from labctl.runs.image_cache import ImageCache
from labctl.servers import guard


@pytest.fixture
def sources(lab: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    return make_sources(lab, tmp_path, monkeypatch)


def test_the_local_engines_image_is_sent_first(sources: Sources) -> None:
    sources.keep()
    (sources.engine / "here").write_text("2048 amd64\n")
    assert sources.ensure() == []
    assert (sources.engine / "loaded").read_bytes() == sources.archive
    assert "here save " + sources.wanted in sources.calls


def test_an_archive_is_loaded(sources: Sources) -> None:
    kept = sources.keep()
    os.utime(sources.cache.path(kept), (1, 1))
    assert sources.ensure() == []
    assert (sources.engine / "loaded").read_bytes() == sources.archive
    assert sources.cache.get_last_use(kept) > 1


def test_a_load_in_advance_leaves_the_lock_alone_if_the_image_is_there(sources: Sources) -> None:
    sources.keep()
    (sources.engine / "there").write_text("2048 amd64\n")
    context = sources.context()
    name = images.lock_name(sources.server, sources.wanted)
    job = image_jobs._make_job(
        context, sources.server, sources.wanted, "load", context.state.find_lock(name), 10**9
    )
    program = [sys.executable, "-m", "labctl.runs.image_jobs", msgspec.json.encode(job).decode()]
    with context.state.lock(name, "as `labctl run` does"):
        subprocess.run(program, stdin=subprocess.DEVNULL, check=True, timeout=30)
    assert not (sources.engine / "loaded").exists()


def test_a_damaged_archive_is_refused_deleted_and_the_image_built(sources: Sources) -> None:
    kept = sources.keep()
    path = sources.cache.path(kept)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    sources.is_on_this_machine = True
    assert sources.ensure(BUILT) == ["build"]
    assert f"{path} is damaged" in sources.reporter.said
    loaded = sources.engine / "loaded"
    assert not loaded.exists() or loaded.read_bytes() == b""
    wait_for(lambda: sources.cache.take_failures() or sources.cache.find(sources.wanted))


def test_an_archive_for_another_architecture_is_named_and_not_loaded(sources: Sources) -> None:
    sources.keep("arm64")
    assert sources.ensure(BUILT) == ["build"]
    assert "is for arm64; the server is amd64" in sources.reporter.said
    assert not (sources.engine / "loaded").exists()


def test_an_archive_that_disappears_leads_to_a_build(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = sources.keep()
    monkeypatch.setattr(ImageCache, "find", lambda *_: kept)
    sources.cache.path(kept).unlink()
    assert sources.ensure(BUILT) == ["build"]
    assert "cannot read" in sources.reporter.said


def list_open_steps(sources: Sources) -> list[str]:
    """List the steps whose bars are still shown."""
    open_steps: list[str] = []
    for step in (event for event in sources.reporter.events if isinstance(event, Step)):
        if step.done:
            open_steps.remove(step.name)
        else:
            open_steps.append(step.name)
    return open_steps


def test_a_server_that_does_not_load_it_builds_it(sources: Sources) -> None:
    sources.keep()
    (sources.engine / "full").touch()
    assert sources.ensure(BUILT) == ["build"]
    assert "`docker load` on the server ended with exit code 1" in sources.reporter.said
    assert list_open_steps(sources) == []


def test_a_lost_server_is_reported_with_the_next_command(sources: Sources) -> None:
    sources.keep()
    (sources.engine / "dead").touch()
    with pytest.raises(LinkLostError, match="lost the connection") as caught:
        sources.ensure()
    assert "labctl status --refresh" in caught.value.hint
    assert "labctl up" in caught.value.hint


def test_a_registry_comes_before_a_build(sources: Sources) -> None:
    sources.name_registry()
    assert sources.ensure(PULLED) == ["pull-image"]
    refused = Turn({}, end={"code": 1, "tail": ["manifest unknown"]})
    assert sources.ensure(refused, BUILT) == ["pull-image", "build"]
    said = sources.reporter.said
    assert f"gave the server no {sources.tag}-amd64, so it builds it: manifest unknown" in said
    assert list_open_steps(sources) == []


@pytest.mark.parametrize(("machine", "name"), [("x86_64", "amd64"), ("aarch64", "arm64")])
def test_the_tag_in_a_registry_names_the_architecture(
    sources: Sources, machine: str, name: str
) -> None:
    """Otherwise servers of two architectures would replace each other's image."""
    sources.name_registry()
    sources.context().save_facts(sources.server, ServerFacts(arch=machine))
    (sources.engine / "there").write_text(f"2048 {name}\n")
    refused = Turn({}, end={"code": 1, "tail": ["manifest unknown"]})
    assert sources.ensure(refused, BUILT) == ["pull-image", "build"]
    reference = f"registry.example/labs:{sources.tag}-{name}"
    assert sources.requests[0] == {"reference": reference, "tag": sources.wanted}
    wait_for(lambda: f"yes push --quiet {reference}" in sources.calls)
    assert sources.cache.take_failures() == []


def test_nothing_is_pulled_for_an_unknown_architecture(sources: Sources) -> None:
    sources.name_registry()
    sources.context().save_facts(sources.server, ServerFacts())
    assert sources.ensure(BUILT) == ["build"]
    assert "the server's architecture is unknown" in sources.reporter.said


def test_a_registry_decides_only_for_labs_that_name_it(sources: Sources) -> None:
    names = {sources.wanted}
    for registry in ("registry.example/labs", "other.example/labs"):
        sources.name_registry(registry)
        names.add(sources.wanted)
    assert len(names) == 3


def test_a_built_image_is_kept_and_loaded_on_the_next_server(sources: Sources) -> None:
    (sources.engine / "there").write_text("2048 amd64\n")
    sources.is_on_this_machine = True
    assert sources.ensure(BUILT) == ["build"]
    image_jobs.wait_for_save(sources.context(), sources.wanted)
    assert sources.cache.take_failures() == []
    assert sources.ensure() == []
    assert (sources.engine / "loaded").read_bytes() == sources.archive


def test_what_another_machine_built_is_not_kept(sources: Sources) -> None:
    """Its owner could put any program into the image, for whichever server loads it later."""
    (sources.engine / "there").write_text("2048 amd64\n")
    assert sources.server.offer.price_usd_per_hour == 0
    assert sources.ensure(BUILT) == ["build"]
    image_jobs.wait_for_save(sources.context(), sources.wanted)
    assert [call.split()[:3] for call in sources.calls] == [["here", "image", "inspect"]]
    assert sources.cache.list_images() == []


def test_the_next_up_reports_why_an_image_was_not_kept(sources: Sources) -> None:
    sources.is_on_this_machine = True
    assert sources.ensure(BUILT) == ["build"]
    (sources.engine / "dead").touch()
    image_jobs.wait_for_save(sources.context(), sources.wanted)
    # An image of another lab is that lab's business.
    sources.cache.record_failure("labctl/built:another", "another was not kept")
    up.up(sources.context())
    assert f"{sources.wanted} was not kept on this machine" in sources.reporter.said
    assert "another was not kept" not in sources.reporter.said


def test_up_starts_to_load_a_kept_image_before_it_arms_the_guards(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.keep()
    arm = guard.arm

    def arm_once_loaded(*arguments: Any, **options: Any) -> Any:
        wait_for(lambda: (sources.engine / "loaded").exists())
        return arm(*arguments, **options)

    monkeypatch.setattr(guard, "arm", arm_once_loaded)
    up.up(sources.context())
    wait_for(lambda: (sources.engine / "loaded").exists())
    lock = images.lock_name(sources.server, sources.wanted)
    with sources.context().state.lock(lock, "test", wait_s=30):
        assert (sources.engine / "loaded").read_bytes() == sources.archive


def test_a_load_that_cannot_start_is_reported_and_the_guards_are_armed(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "Dockerfile")

    armed: list[object] = []
    monkeypatch.setattr(images, "start_load", fail)
    monkeypatch.setattr(guard, "arm", lambda *_, **__: armed.append(1))
    up.up(sources.context())
    assert armed
    assert "the image is not loaded in advance: [Errno 13]" in sources.reporter.said


ID = f"sha256:{'1' * 64}"
NOT_STORED = Turn({"why": "the store does not have it"})


def use_store(sources: Sources) -> None:
    yaml = "lab: digits\nimage: {build: ., store: true}\nstore: ssh://me@store.example/~/labs\n"
    (sources.lab.home / "lab" / "lab.yaml").write_text(yaml)


def build_and_store(sources: Sources) -> None:
    use_store(sources)
    built = Turn({"ids": {sources.wanted: ID}})
    assert sources.ensure(BUILT, built, Turn({})) == ["build", "image", "store-image"]


def test_an_image_that_the_lab_built_is_loaded_from_its_store(sources: Sources) -> None:
    build_and_store(sources)
    assert sources.ensure(Turn({"why": ""})) == ["load-image"]
    steps = [event.name for event in sources.reporter.events if isinstance(event, Step)]
    assert steps[-1] == f"loading {sources.wanted} from the store"


def test_an_image_that_the_store_lacks_is_built_and_stored_again(sources: Sources) -> None:
    build_and_store(sources)
    again = Turn({"ids": {sources.wanted: ID}})
    verbs = ["load-image", "build", "image", "store-image"]
    assert sources.ensure(NOT_STORED, BUILT, again, Turn({})) == verbs
    assert "was not loaded from the store: the store does not have it" in sources.reporter.said


def test_a_store_is_not_asked_for_what_this_lab_has_not_built(sources: Sources) -> None:
    use_store(sources)
    context = sources.context()
    detail = {"image": sources.wanted, "id": ID, "architecture": "amd64"}
    context.state.record(stored_images.BUILT_EVENT, lab_id="another", detail=detail)
    other = {**detail, "architecture": "arm64"}
    context.state.record(stored_images.BUILT_EVENT, lab_id=context.lab_id, detail=other)
    built = Turn({"ids": {sources.wanted: ID}})
    assert sources.ensure(BUILT, built, Turn({})) == ["build", "image", "store-image"]


def test_an_image_that_cannot_be_stored_costs_only_the_copy(sources: Sources) -> None:
    use_store(sources)
    failed = Turn({"error": {"kind": "store", "what": "the store is full"}})
    assert sources.ensure(BUILT, failed) == ["build", "image"]
    text = "is not kept in ssh://me@store.example/~/labs: the store is full"
    assert text in sources.reporter.said


@pytest.mark.parametrize(
    ("index", "packages", "is_stored"),
    [
        pytest.param("https://me:secret@index.example/simple", "six", False, id="index"),
        pytest.param("https://:secret@index.example/simple", "six", False, id="index-password"),
        pytest.param("", "a @ git+https://token@git.example/a.git", False, id="repository"),
        pytest.param("", "--extra-index-url https://me:secret@x.example/", False, id="list"),
        pytest.param(
            "https://index.example/simple",
            "a @ git+https://git.example/a.git@v1\nb @ git+ssh://git@git.example/b.git",
            True,
            id="no-credentials",
        ),
    ],
)
def test_an_image_that_contains_credentials_is_not_stored(
    sources: Sources, index: str, packages: str, is_stored: bool
) -> None:
    config = sources.lab.home / ".config" / "labctl" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(f"package_index: {index}\n" if index else "")
    config.chmod(0o600)
    use_store(sources)
    lab_file = sources.lab.home / "lab" / "lab.yaml"
    lab_file.write_text(lab_file.read_text().replace("build: .", "requirements: list.txt"))
    (sources.lab.home / "lab" / "list.txt").write_text(f"{packages}\n")
    sources.wanted = images.image_reference(sources.context())
    stored = [Turn({"ids": {sources.wanted: ID}}), Turn({})] if is_stored else []
    verbs = ["build", "image", "store-image"] if is_stored else ["build"]
    assert sources.ensure(BUILT, *stored) == verbs
    assert ("contains credentials" in sources.reporter.said) is not is_stored


def test_up_has_the_server_load_from_the_store_what_this_machine_does_not_keep(
    sources: Sources,
) -> None:
    build_and_store(sources)
    wire = Wire([Turn({})])
    images.start_stored_load(sources.context(wire), sources.server)
    assert [verb for verb, _ in wire.asked] == ["start-load-image"]
    sources.keep()
    images.start_stored_load(sources.context(Wire([])), sources.server)


def test_a_command_that_waits_for_the_upload_in_advance_says_so_in_words(sources: Sources) -> None:
    sources.keep()
    (sources.engine / "pauses").touch()
    up.up(sources.context())
    wait_for((sources.engine / "begun").exists)

    def finish_load(text: str) -> None:
        notes.append(text)
        (sources.engine / "go").touch()

    notes: list[str] = []
    context = sources.context()
    lock = images.lock_name(sources.server, sources.wanted)
    with context.state.lock(lock, "run", wait_s=30, on_wait=finish_load):
        pass
    (note,) = notes
    assert f"has been uploading the image {sources.wanted} to the server since " in note

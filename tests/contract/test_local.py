"""What only the local provider promises: caches that outlive servers, and words for no engine."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from case import Case
from docker import errors as docker_errors

from labctl.errors import BuildError, ProviderError
from labctl.model import Resource
from labctl.providers.local import (
    LocalProvider,
    LocalSettings,
    cache,
    checks,
    engine,
    image,
    volume_images,
)
from labctl.providers.local.container import make_server_id
from labctl.providers.local.engine import EngineInfo, make_unusable_error
from labctl.providers.local.volume_images import list_volumes_with

IMAGE_SOURCE = Path(__file__).parents[2] / "images" / "lab-server"


def never_started(docker: Any, some_image: str, name: str, volume: str) -> Any:
    labels = {"labctl.server": name, "labctl.created-at": "0", "labctl.test": "1"}
    mounts = {volume: {"bind": cache.MOUNT_POINT, "mode": "rw"}}
    return docker.containers.create(some_image, name=name, volumes=mounts, labels=labels)


@pytest.fixture
def server_image(local_provider: LocalProvider) -> str:
    around = local_provider.context
    with engine.connect() as docker:
        return image.ensure(docker, IMAGE_SOURCE, around.base_image, around.progress)


@pytest.mark.engine
def test_claims_at_once_get_a_volume_each(local_provider: LocalProvider, server_image: str) -> None:
    owner = local_provider.context.owner

    def claim_one(number: int) -> tuple[str, str]:
        with engine.connect() as docker:
            made = cache.claim(
                docker,
                owner,
                lambda name, volume: never_started(docker, server_image, name, volume),
            )
            made.rename(f"labctl-{owner}-{number}")
            made.reload()
            return str(made.id), made.attrs["Mounts"][0]["Name"]

    with ThreadPoolExecutor(6) as threads:
        claimed = list(threads.map(claim_one, range(6)))
    with engine.connect() as docker:
        for container, _ in claimed:
            docker.containers.get(container).remove(force=True)
    assert len({volume for _, volume in claimed}) == 6


@dataclass
class Pool:
    """The volumes of an owner that nobody else has."""

    docker: Any
    owner: str
    image: str
    count: int = 0

    def make(self, name: str, volume: str) -> Any:
        return never_started(self.docker, self.image, name, volume)

    def claim(self, *arguments: Any) -> Any:
        return cache.claim(self.docker, self.owner, self.make, *arguments)

    def add_volume(self, names: object = None) -> str:
        """Add a volume; with `names`, an engine in it has listed them as those of its images."""
        # Volumes of the same second are ordered by name.
        self.count += 1
        volume = f"labctl-cache-{self.owner}-{self.count}"
        self.docker.volumes.create(volume, labels={cache.LABEL: self.owner})
        if names is not None:
            self.write_names(volume, json.dumps({"Repositories": names}))
        return volume

    def write_names(self, volume: str, text: str) -> None:
        script = 'mkdir -p image/overlay2; printf "%s" "$0" > image/overlay2/repositories.json'
        self.docker.containers.run(
            self.image,
            ["-c", script, text],
            entrypoint="sh",
            working_dir="/v",
            volumes={volume: {"bind": "/v", "mode": "rw"}},
            remove=True,
        )

    def list_with(self, reference: str) -> list[str]:
        return list_volumes_with(self.docker, self.image, self.owner, reference)


@pytest.fixture
def pool(server_image: str) -> Iterator[Pool]:
    owner = f"pool-{secrets.token_hex(4)}"
    with engine.connect() as docker:
        yield Pool(docker, owner, server_image)
        for volume in cache.list_volumes(docker, owner):
            docker.volumes.get(volume).remove()


@pytest.mark.engine
def test_a_volume_that_is_being_filled_is_not_claimed(pool: Pool) -> None:
    def fill(name: str, volume: str) -> bool:
        helper = pool.make(name, volume)
        meanwhile = pool.claim()
        claimed.append(cache.get_volume(meanwhile))
        for container in (meanwhile, helper):
            container.remove(force=True)
        assert claimed != [volume]
        return True

    claimed: list[str] = []
    made = pool.claim(["in use by another server"], fill)
    claimed.append(cache.get_volume(made))
    made.remove(force=True)
    assert len(set(claimed)) == 2


@pytest.mark.engine
def test_a_free_volume_with_the_image_comes_before_older_ones(pool: Pool) -> None:
    old, new = pool.add_volume(), pool.add_volume()
    made = pool.claim([new], lambda name, volume: pytest.fail("a volume is free"))
    assert cache.get_volume(made) == new
    made.remove(force=True)
    assert cache.list_volumes(pool.docker, pool.owner) == [old, new]


@pytest.mark.engine
def test_a_new_volume_is_filled_although_others_are_free(pool: Pool) -> None:
    old = pool.add_volume()
    made = pool.claim(["in use by another server"], lambda name, volume: True)
    assert cache.get_volume(made) != old
    made.remove(force=True)


@pytest.mark.engine
def test_a_volume_that_could_not_be_filled_does_not_stay(pool: Pool) -> None:
    old = pool.add_volume()
    made = pool.claim(["in use by another server"], lambda name, volume: False)
    assert cache.get_volume(made) == old
    assert cache.list_volumes(pool.docker, pool.owner) == [old]
    made.remove(force=True)


@pytest.mark.engine
def test_volumes_are_found_by_the_images_in_them(pool: Pool) -> None:
    digest = f"python@sha256:{'1' * 64}"
    built = pool.add_volume({"labctl/built": {"labctl/built:0a": "sha256:1"}})
    python = pool.add_volume({"python": {"python:latest": "sha256:2", digest: "sha256:2"}})
    pool.add_volume()
    pool.write_names(pool.add_volume(), '{"Repositories": {"labctl/built": {"labctl/bu')
    assert pool.list_with("labctl/built:0a") == [built]
    for name in ("python", "docker.io/library/python:latest", digest):
        assert pool.list_with(name) == [python]
    assert pool.list_with("labctl/built:0b") == []


@pytest.mark.engine
def test_volumes_whose_images_are_being_read_are_free(pool: Pool) -> None:
    volume = pool.add_volume()
    reader = volume_images._create_reader(pool.docker, pool.image, pool.owner, [volume])
    try:
        made = pool.claim()
        assert cache.get_volume(made) == volume
        made.remove(force=True)
    finally:
        reader.remove(force=True)


@pytest.mark.engine
def test_readers_of_killed_processes_do_not_stay(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = pool.add_volume()
    reader = volume_images._create_reader(pool.docker, pool.image, pool.owner, [volume])
    pool.list_with("python")
    reader.reload()  # it is young, so its process may still read
    monkeypatch.setattr(volume_images, "ABANDONED_S", -1)
    pool.list_with("python")
    with pytest.raises(docker_errors.NotFound):
        reader.reload()
    pool.docker.volumes.get(volume).remove()


@pytest.mark.engine
def test_freed_volume_is_taken_again(local_provider: LocalProvider, server_image: str) -> None:
    def claim_and_free() -> str:
        with engine.connect() as docker:
            made = cache.claim(
                docker,
                local_provider.context.owner,
                lambda name, volume: never_started(docker, server_image, name, volume),
            )
            made.remove(force=True)
            return str(made.attrs["Mounts"][0]["Name"])

    assert claim_and_free() == claim_and_free()


@pytest.mark.engine
def test_claim_of_a_dead_create_is_a_leftover_and_no_server(
    local_provider: LocalProvider, server_image: str
) -> None:
    """A create killed between claiming its volume and naming its server."""
    with engine.connect() as docker:
        made = cache.claim(
            docker,
            local_provider.context.owner,
            lambda name, volume: never_started(docker, server_image, name, volume),
        )
        name = str(made.name)
    assert name not in [server.id for server in local_provider.servers()]
    assert local_provider.find(name) is None
    [left] = [found for found in local_provider.leftovers() if found.id == name]
    assert left.kind == "container"
    local_provider.remove(left)
    assert name not in [found.id for found in local_provider.leftovers()]


@pytest.mark.engine
def test_server_that_was_made_but_never_started_starts(local_case: Case) -> None:
    """A create killed between naming its server and starting it."""
    provider = local_case.provider
    assert isinstance(provider, LocalProvider)
    request = local_case.request()
    with engine.connect() as docker:
        made = provider._create_container(docker, request)
        assert made.status == "created"
    found = provider.find(make_server_id(request))
    assert found is not None
    assert found.state == "stopped"
    assert local_case.create(request).id == found.id
    local_case.log_in(local_case.running(found))


@pytest.mark.engine
def test_caches_of_others_are_not_ours(local_provider: LocalProvider) -> None:
    other = f"contract-{secrets.token_hex(4)}"
    with engine.connect() as docker:
        volume = docker.volumes.create(f"labctl-cache-{other}", labels={cache.LABEL: other})
        try:
            assert volume.name in cache.list_free_volumes(docker, other)
            assert volume.name not in cache.list_free_volumes(docker, local_provider.context.owner)
            assert volume.name not in [found.id for found in local_provider.leftovers()]
            assert list_removed_volumes("someone-else") == []
            assert list_removed_volumes(other) == [volume.name]
        finally:
            volume.remove()


@pytest.mark.engine
def test_the_same_login_name_with_another_home_has_other_caches(
    local_provider: LocalProvider, server_image: str, tmp_path: Path
) -> None:
    """In containers that share an engine, everybody may be root."""

    def make(home: str, pool: str = "") -> LocalProvider:
        changes = {"home": tmp_path / home, "cache_pool": pool}
        context = msgspec.structs.replace(local_provider.context, **changes)
        return LocalProvider(LocalSettings(), context)

    def list_caches(provider: LocalProvider) -> list[str]:
        return [one.id for one in provider.leftovers() if one.id.startswith("labctl-cache-")]

    shared = f"contract-{secrets.token_hex(4)}"
    ann, bob = make("ann"), make("bob")
    with engine.connect() as docker:
        claimed = Pool(docker, ann.context.cache_owner, server_image).claim()
        claimed.remove(force=True)
        volume = docker.volumes.create(f"labctl-cache-{shared}", labels={cache.LABEL: shared})
        try:
            assert list_caches(ann) == [cache.get_volume(claimed)]
            assert list_caches(bob) == []
            assert list_caches(make("ann", shared)) == [volume.name]
            assert list_caches(make("bob", shared)) == [volume.name]
        finally:
            volume.remove()
            docker.volumes.get(cache.get_volume(claimed)).remove()


def list_removed_volumes(owner: str) -> list[str]:
    """The volumes that the command of `doctor` for a full disk names."""
    info = EngineInfo(version="28.2.2", os="linux", root="/")
    with patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=0)):
        every = checks.list_engine_checks(info, built=True, base_problem="", owner=owner)
    [command] = [check.next for check in every if check.name == "disk for images"]
    words = ["sh", "-c", command.replace("docker volume rm", "echo")]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.engine
def test_cache_in_use_is_neither_listed_nor_removed(local_case: Case) -> None:
    server = local_case.create()
    with engine.connect() as docker:
        mounts = docker.containers.get(server.id).attrs["Mounts"]
    [volume] = [mount["Name"] for mount in mounts if mount["Type"] == "volume"]
    assert volume not in [found.id for found in local_case.provider.leftovers()]
    with pytest.raises(ProviderError) as raised:
        local_case.provider.remove(Resource(provider="local", kind="cache", id=volume))
    assert "in use" in raised.value.why


@pytest.mark.engine
def test_base_image_that_cannot_be_had_is_told_with_the_way_out(
    local_provider: LocalProvider, local_case: Case
) -> None:
    around = msgspec.structs.replace(
        local_provider.context, base_image="127.0.0.1:1/nobody/nothing:here"
    )
    provider = LocalProvider(LocalSettings(), around)
    (check,) = (one for one in provider.check() if one.name == "lab server image")
    assert check.warning
    assert check.detail.startswith("127.0.0.1:1/nobody/nothing:here is not available: ")
    assert check.next.startswith("scripts/base-image ")
    request = local_case.request()
    with pytest.raises(BuildError) as raised:
        provider.create(provider.offers(request.need)[0], request)
    assert "127.0.0.1:1/nobody/nothing:here" in raised.value.what
    assert "scripts/base-image" in raised.value.hint
    assert "FROM" in Path(raised.value.log_path).read_text()
    assert local_case.ours() == []
    Path(raised.value.log_path).unlink()


@pytest.mark.engine
def test_own_image_that_is_not_there_is_told(
    local_provider: LocalProvider, local_case: Case
) -> None:
    settings = LocalSettings(image="labctl-nobody/nothing:here")
    provider = LocalProvider(settings, local_provider.context)
    request = local_case.request()
    with pytest.raises(ProviderError) as raised:
        provider.create(provider.offers(request.need)[0], request)
    assert raised.value.hint == "docker pull labctl-nobody/nothing:here"


@pytest.mark.engine
def test_server_that_the_engine_cannot_start_does_not_stay(
    local_provider: LocalProvider, local_case: Case
) -> None:
    settings = LocalSettings(memory_bytes=1)
    provider = LocalProvider(settings, local_provider.context)
    request = local_case.request()
    with pytest.raises(ProviderError) as raised:
        provider.create(provider.offers(request.need)[0], request)
    assert "memory" in raised.value.why.lower()
    assert local_case.ours() == []


def test_image_is_named_after_its_content_and_base(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    before = image.reference(tmp_path)
    assert before == image.reference(tmp_path, image.DEFAULT_BASE)
    assert before != image.reference(tmp_path, "debian:trixie-slim")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nUSER 1\n")
    assert image.reference(tmp_path) != before


@pytest.mark.parametrize(
    ("cause", "programs", "what", "hint"),
    [
        (
            PermissionError(13, "denied"),
            ["docker"],
            "no access to Docker Engine",
            "usermod -aG docker",
        ),
        (
            FileNotFoundError(2, "no"),
            ["apt-get"],
            "Docker Engine is not installed",
            "apt-get install --yes docker.io",
        ),
        (FileNotFoundError(2, "no"), [], "Docker Engine is not installed", "docs.docker.com"),
        (FileNotFoundError(2, "no"), ["docker"], "not running", "docker"),
        (ConnectionRefusedError(111, "no"), ["dockerd"], "not running", "docker"),
        (ValueError("odd"), ["docker"], "does not answer", "docker version"),
    ],
)
def test_unusable_engine_is_told_with_what_to_type(
    cause: Exception, programs: list[str], what: str, hint: str
) -> None:
    error = RuntimeError("Error while fetching server API version", ("aborted", cause))
    error.__cause__ = cause
    told = make_unusable_error(error, platform="linux", installed=programs.__contains__)
    assert what in told.what
    assert hint in told.hint


def test_mac_is_sent_to_docker_desktop() -> None:
    told = make_unusable_error(
        FileNotFoundError(2, "no"), platform="darwin", installed=lambda _: False
    )
    assert "Docker" in told.hint
    assert "apt" not in told.hint


@pytest.mark.engine
def test_the_end_of_a_server_says_what_it_waits_for(
    local_provider: LocalProvider, local_case: Case
) -> None:
    shown: list[tuple[str, float]] = []
    server = local_case.create()
    recording = msgspec.structs.replace(
        local_provider.context, progress=lambda text, done, total: shown.append((text, done))
    )
    LocalProvider(LocalSettings(), recording).terminate(server.id)
    assert shown == [
        (f"{part} {server.id}", done)
        for part in ("deleting the containers on", "stopping", "deleting")
        for done in (0, 1)
    ]

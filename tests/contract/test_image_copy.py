"""Images that cannot be copied from another server: a note says why, and none is there by half."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.providers.local import LocalProvider, engine, image, image_copy

pytestmark = pytest.mark.engine

IMAGE_SOURCE = Path(__file__).parents[2] / "images" / "lab-server"
# The files of an engine that has one layer, of 20 MB.
ENGINE_FILES = """
cd /from && mkdir -p image/overlay2/imagedb image/overlay2/layerdb/sha256/1 overlay2/l overlay2/a
echo '{}' > image/overlay2/repositories.json
cd image/overlay2/layerdb/sha256/1 && echo 20000000 > size && printf a > cache-id
head -c 20000000 /dev/urandom > /from/overlay2/a/file
"""


@dataclass
class Copying:
    """Two volumes, and a copy from one to the other by the product's own container."""

    docker: Any
    provider: LocalProvider
    server_image: str
    source: str = ""
    target: str = ""
    notes: list[str] = field(default_factory=list)

    def sh(self, line: str) -> str:
        volumes = {self.source: {"bind": "/from"}, self.target: {"bind": "/to"}}
        output = self.docker.containers.run(
            self.server_image, ["-c", line], entrypoint="sh", volumes=volumes, remove=True
        )
        return str(output.decode())

    def copy(self) -> list[str]:
        """Copy; return the notes."""
        context = msgspec.structs.replace(self.provider.context, note=self.notes.append)
        name = f"{self.target}-claim"
        has_images = image_copy.copy_images(
            self.docker, context, self.server_image, self.source, name, self.target
        )
        assert has_images == (not self.notes)
        return self.notes

    def list_copied(self) -> list[str]:
        return self.sh("ls -A /to").split()


def describe(reason: str) -> list[str]:
    text = f"the images of another server were not copied: {reason}"
    return [f"{text}. The first run loads or builds its image."]


@pytest.fixture
def make_volume() -> Iterator[Callable[..., str]]:
    with engine.connect() as docker:
        made = []

        def make(**options: str) -> str:
            name = f"labctl-test-copy-{secrets.token_hex(4)}"
            made.append(docker.volumes.create(name, driver_opts=options))
            return name

        yield make
        for volume in made:
            volume.remove()


@pytest.fixture
def copying(
    local_provider: LocalProvider,
    make_volume: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Copying]:
    around = local_provider.context
    with engine.connect() as docker:
        server_image = image.ensure(docker, IMAGE_SOURCE, around.base_image, around.progress)
        copying = Copying(docker, local_provider, server_image)
        copying.source, copying.target = make_volume(), make_volume()
        copying.sh(ENGINE_FILES)
        monkeypatch.setattr(image_copy, "SPARE_BYTES", 0)
        yield copying


def test_a_copy_has_all_or_nothing_and_needs_no_note(copying: Copying) -> None:
    assert copying.copy() == []
    assert sorted(copying.list_copied()) == ["image", "overlay2"]
    assert copying.sh("cmp /from/overlay2/a/file /to/overlay2/a/file") == ""


def test_too_many_bytes_are_not_copied(copying: Copying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_copy, "MOST_BYTES", 19_999_999)
    assert copying.copy() == describe("together they have more than 6 GiB")
    assert copying.list_copied() == []


def test_a_disk_without_space_is_not_filled(
    copying: Copying, make_volume: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copying.target = make_volume(type="tmpfs", device="tmpfs", o="size=24m")
    monkeypatch.setattr(image_copy, "SPARE_BYTES", 10_000_000)
    assert copying.copy() == describe("the disk has too little space")


def test_a_disk_that_fills_up_meanwhile_is_named(
    copying: Copying, make_volume: Callable[..., str]
) -> None:
    copying.sh("echo 1 > /from/image/overlay2/layerdb/sha256/1/size")
    copying.target = make_volume(type="tmpfs", device="tmpfs", o="size=8m")
    (note,) = copying.copy()
    assert "No space left on device (exit code 1)" in note


def test_an_image_that_is_removed_meanwhile_leaves_nothing(copying: Copying) -> None:
    copying.sh("rm -r /from/overlay2/a")
    (note,) = copying.copy()
    assert "/from/overlay2/a': No such file or directory (exit code 1)" in note
    assert copying.list_copied() == []


def test_another_storage_driver_is_named(copying: Copying) -> None:
    copying.sh("rm -r /from/image")
    assert copying.copy() == describe("its engine does not use the storage driver overlay2")
    assert copying.list_copied() == []


def test_a_copy_that_is_cut_off_has_no_image(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The script waits for ever for the text of this pipe, after it has copied the images' records.
    copying.sh("cd /from/image/overlay2/layerdb/sha256/1 && rm cache-id && mkfifo cache-id")
    monkeypatch.setattr(image_copy, "LONGEST_S", 3)
    assert copying.copy() == describe("it took longer than 3 s")
    assert copying.list_copied() == [".copying"]
    assert copying.sh("ls /to/.copying/image/overlay2/layerdb/sha256").split() == ["1"]

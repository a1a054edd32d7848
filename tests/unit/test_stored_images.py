"""Images in a lab's store: what the server sends, and that it loads nothing else than was built."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_socket import Answer, engine_socket
from store_bed import ABOUT, PREFIX, DirectStore, Lab

from labctl.agent.files import files
from labctl.agent.mirror import image_download, image_upload, images
from labctl.agent.mirror.store import Progress
from labctl.agent.reply import Failure
from labctl.wire.images import LoadStoredImageRequest, StoreImageRequest

NAME = "labctl/built:0123456789abcdef"
LAYERS = (b"first layer" * 100_000, b"second layer")
DOCKER = """#!/bin/sh
case "$1" in
  save) cat "$ENGINE/saved"; exit "$(cat "$ENGINE/save-code" 2>/dev/null || echo 0)" ;;
  load) cat > "$ENGINE/loading"; [ ! -e "$ENGINE/refuses" ] || { echo no space >&2; exit 1; }
        mv "$ENGINE/loading" "$ENGINE/loaded" ;;
esac
"""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Engine:
    """The server's engine: `docker` is a small program; the socket shows the image."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layers = LAYERS
        names = [f"sha256:{sha256(layer)}" for layer in LAYERS]
        # An empty layer occurs more than once in many images.
        config = {"rootfs": {"diff_ids": [*names, names[1]]}, "config": {}}
        self.config = json.dumps(config).encode()
        self.id = f"sha256:{sha256(self.config)}"
        self.diff_ids = config["rootfs"]["diff_ids"]
        self.save([self.config, *LAYERS, b'[{"Config": "..."}]'])

    def save(self, files: list[bytes]) -> None:
        with tarfile.open(self.folder / "saved", "w") as archive:
            for number, content in enumerate(files):
                member = tarfile.TarInfo(f"file-{number}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    def answer(self, method: str, path: str, body: Any) -> Answer | None:
        about = {"Id": self.id, "Size": 1000, "RootFS": {"Layers": self.diff_ids}}
        shown = path.endswith(f"/images/{self.id}/json") or ("labctl" in path and self.loaded)
        return (200, about) if shown else None

    @property
    def loaded(self) -> dict[str, bytes]:
        if not (self.folder / "loaded").exists():
            return {}
        with tarfile.open(self.folder / "loaded") as archive:
            return {
                member.name: file.read()
                for member in archive
                if (file := archive.extractfile(member))
            }


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "docker").write_text(DOCKER)
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("ENGINE", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Engine(folder)
    with engine_socket() as socket:
        socket.answers = made.answer
        monkeypatch.setenv("DOCKER_HOST", socket.host)
        yield made


@pytest.fixture
def store(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the lab's images in a store that is reached without an ssh."""
    directory = tmp_path / "store" / PREFIX

    def open_directly(root: Path, lab: str, lab_id: str, progress: Progress) -> DirectStore:
        opened = DirectStore(directory)
        opened.progress = progress
        return opened

    monkeypatch.setattr(images, "open_store", open_directly)
    monkeypatch.setattr(image_upload, "lower_priority", lambda: None)
    Lab(tmp_path).config("ssh://student@store/labs")
    return directory / "images"


def send(engine: Engine) -> None:
    image_upload.send(StoreImageRequest(**ABOUT, image_id=engine.id))


def load(engine: Engine) -> str:
    return image_download.load(
        LoadStoredImageRequest(**ABOUT, image_id=engine.id, reference=NAME)
    ).why


def blob(store: Path, content: bytes) -> Path:
    return store / f"{sha256(content)}.gz"


def replace_blob(store: Path, layer: bytes, content: bytes, content_size: int) -> None:
    """Replace a layer's file, and its entry in the image's record."""
    blob(store, layer).write_bytes(content)
    (record,) = store.glob("*.json")
    about = json.loads(record.read_text())
    about["blobs"][sha256(layer)] = [len(content), content_size]
    record.write_text(json.dumps(about))


def test_an_image_comes_back_from_the_store_with_its_layers_and_its_name(
    engine: Engine, store: Path
) -> None:
    send(engine)
    assert len(list(store.glob("*.gz"))) == 3, "the configuration and two layers, nothing else"
    assert load(engine) == ""
    loaded = engine.loaded
    (entry,) = json.loads(loaded.pop("manifest.json"))
    assert entry["RepoTags"] == [NAME]
    assert loaded[entry["Config"]] == engine.config
    assert [loaded[name] for name in entry["Layers"]] == [*LAYERS, LAYERS[1]]
    assert len(loaded) == 3


def test_layers_that_the_store_has_are_the_same_files(engine: Engine, store: Path) -> None:
    send(engine)
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    send(engine)
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before


def test_nothing_is_recorded_if_a_layer_is_missing(engine: Engine, store: Path) -> None:
    engine.save([engine.config, LAYERS[0]])
    with pytest.raises(Failure, match="not stored"):
        send(engine)
    assert not list(store.glob("*.json"))
    assert load(engine) == "the store does not have it"


def test_nothing_is_recorded_if_docker_fails(engine: Engine, store: Path) -> None:
    (engine.folder / "save-code").write_text("1")
    with pytest.raises(Failure, match="not stored"):
        send(engine)
    assert not list(store.glob("*.json"))


def test_a_store_that_refuses_costs_only_the_copy(engine: Engine, store: Path) -> None:
    store.parent.mkdir(parents=True)
    store.write_text("a file where the directory would be")
    with pytest.raises(Failure, match="not stored"):
        send(engine)
    assert load(engine)
    assert engine.loaded == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"not compressed", gzip.compress(b"another"), gzip.compress(LAYERS[1])[:-9]],
    ids=["empty", "not compressed", "another content", "cut off"],
)
def test_a_layer_with_another_content_is_never_loaded(
    engine: Engine, store: Path, content: bytes
) -> None:
    """Whoever can write to the store can change the record as well."""
    send(engine)
    replace_blob(store, LAYERS[1], content, 10**6)
    assert load(engine)
    assert engine.loaded == {}


def test_another_configuration_is_never_loaded(engine: Engine, store: Path) -> None:
    send(engine)
    other = json.dumps({"rootfs": {"diff_ids": engine.diff_ids[:1]}}).encode()
    blob(store, engine.config).write_bytes(gzip.compress(other))
    assert "damaged" in load(engine)
    assert engine.loaded == {}


def test_a_layer_that_unpacks_to_more_than_its_record_says_is_not_read_on(
    engine: Engine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(engine)
    replace_blob(store, LAYERS[1], gzip.compress(b"\0" * 50_000_000), len(LAYERS[1]))
    read: list[int] = []
    real = gzip.GzipFile.read

    def count(file: gzip.GzipFile, size: int | None = -1) -> bytes:
        content = real(file, size)
        read.append(len(content))
        return content

    monkeypatch.setattr(gzip.GzipFile, "read", count)
    assert load(engine)
    assert sum(read) < 10_000_000


def test_a_layer_that_has_expired_is_missed_and_sent_again(engine: Engine, store: Path) -> None:
    send(engine)
    blob(store, LAYERS[0]).unlink()
    assert "does not have it" in load(engine)
    assert engine.loaded == {}
    send(engine)
    assert load(engine) == ""


def test_an_engine_that_refuses_the_image_is_quoted(engine: Engine, store: Path) -> None:
    send(engine)
    (engine.folder / "refuses").touch()
    assert load(engine) == "`docker load` failed: no space"


def test_an_image_that_is_there_is_not_loaded_again(engine: Engine, store: Path) -> None:
    send(engine)
    assert load(engine) == ""
    blob(store, LAYERS[1]).unlink()
    assert load(engine) == ""


def test_a_disk_without_room_is_named(
    engine: Engine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(engine)
    monkeypatch.setattr(images, "count_free_bytes", lambda _: 10**6)
    assert "no room" in load(engine)
    with pytest.raises(Failure, match="not stored"):
        send(engine)


def test_a_record_cannot_hide_how_much_disk_an_image_needs(engine: Engine, store: Path) -> None:
    """Whoever can write to the store could fill the disk, which a run needs for its checkpoints."""
    send(engine)
    (record,) = store.glob("*.json")
    about = json.loads(record.read_text())
    about["blobs"][sha256(LAYERS[1])] = [10**15, 10**6]
    about["blobs"]["0" * 64] = [-(10**15), 0]
    record.write_text(json.dumps(about))
    assert "record of the image is damaged" in load(engine)
    assert engine.loaded == {}


@pytest.mark.parametrize(
    "record", [b"", b"{}", b"[" * 100_000, b'{"blobs": {"x": [1]}}', b'{"blobs": {"x": ["1", 2]}}']
)
def test_a_record_of_another_shape_is_named(engine: Engine, store: Path, record: bytes) -> None:
    send(engine)
    (path,) = store.glob("*.json")
    path.write_bytes(record)
    assert load(engine) == "the store's record of the image is damaged"
    assert engine.loaded == {}


def test_an_image_is_not_loaded_or_sent_without_room_for_the_engines_own_copy(
    engine: Engine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker save` and `docker load` write the archive to the disk before they go on."""
    send(engine)
    stored = sum(path.stat().st_size for path in store.glob("*.gz"))
    content = len(engine.config) + sum(map(len, LAYERS))
    free = files.RESERVE_BYTES + stored + 2 * content
    monkeypatch.setattr(images, "count_free_bytes", lambda _: free - 1)
    assert "no room" in load(engine)
    monkeypatch.setattr(images, "count_free_bytes", lambda _: free)
    assert load(engine) == ""
    monkeypatch.setattr(images, "count_free_bytes", lambda _: files.RESERVE_BYTES + 1999)
    with pytest.raises(Failure, match="not stored"):
        send(engine)


def test_a_store_that_takes_longer_than_a_build_is_left(
    engine: Engine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(engine)
    monkeypatch.setattr(image_download, "MEASURE_S", 0.0)
    assert load(engine) == ""
    (engine.folder / "loaded").unlink()
    monkeypatch.setattr(image_download, "MOST_REMAINING_S", 0.0)
    assert "the link to the store is too slow: it would take" in load(engine)
    assert engine.loaded == {}


@pytest.mark.parametrize("config", [b"{}", b"[]", b"1", b"[" * 100_000, b'{"rootfs": []}'])
def test_the_id_of_another_file_is_refused(engine: Engine, store: Path, config: bytes) -> None:
    """A server says what the id of its image is."""
    engine.config = config
    engine.id = f"sha256:{sha256(config)}"
    engine.save([config, *LAYERS])
    send(engine)
    assert load(engine)
    assert engine.loaded == {}


def test_what_a_killed_process_left_is_removed(engine: Engine, store: Path, tmp_path: Path) -> None:
    left = tmp_path / "labctl" / "digits" / ".labctl" / "send-image" / "draft"
    left.parent.mkdir()
    left.write_bytes(b"half of a layer")
    send(engine)
    assert not left.parent.exists()
    assert load(engine) == ""


def test_no_key_of_the_store_comes_from_a_name(engine: Engine, store: Path) -> None:
    request = LoadStoredImageRequest(**ABOUT, image_id="sha256:../../x", reference=NAME)
    assert "is not the id of an image" in image_download.load(request).why

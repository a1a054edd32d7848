"""Loading an image from the lab's store, if its content has the hashes that its id implies."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import time
import zlib
from pathlib import Path
from typing import IO, NamedTuple

from ...wire.codec import MessageError, decode
from ...wire.docker_archives import DockerCommandError, feed_load
from ...wire.images import (
    LOAD_STORED_IMAGE,
    LoadStoredImageReply,
    LoadStoredImageRequest,
    StoredBlob,
    StoredImageRecord,
)
from ..broker.detection import is_brokered
from ..host.engine import inspect_image
from ..host.paths import CHUNK, lab_dir
from ..reply import Failure
from .images import (
    PREFIX,
    build_image_key,
    open_folder,
    open_lab_store,
    parse_digest,
    require_space,
)
from .store import MirrorStore, StoreError, can_use_store, read_config, rerun_with_boto3

_DAMAGED_RECORD = "the store's record of the image is damaged"
# bytes of an image's configuration; the largest are some hundred KiB
_MOST_CONFIG_BYTES = 16 * 1024 * 1024
# After this many seconds, the remaining time is estimated from the speed so far. If it is longer
# than a typical build, the server builds the image instead.
MEASURE_S = 10.0
MOST_REMAINING_S = 300.0


def load(request: LoadStoredImageRequest) -> LoadStoredImageReply:
    """Load an image from the lab's store, if its content has the hashes that the id implies."""
    root = lab_dir(request.lab, request.lab_id)
    url = read_config(root).url
    if not url or is_brokered():
        return LoadStoredImageReply("this server has no store for images")
    try:
        if not can_use_store(url):
            return rerun_with_boto3(LOAD_STORED_IMAGE, request)
        with open_folder(root, "load-image") as folder:
            pace = _Pace(folder)
            with open_lab_store(root, request, pace.check) as store:
                _load(folder, store, pace, parse_digest(request.image_id), request.reference)
    except Failure as failure:
        return LoadStoredImageReply(failure.report.why or failure.report.what)
    except (StoreError, OSError, EOFError, ValueError, zlib.error) as error:
        return LoadStoredImageReply(str(error) or type(error).__name__)
    return LoadStoredImageReply("")


class _Pace:
    """Stops a download that would take longer than a build."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started_s = 0.0
        self._total = 0

    def begin(self, total: int) -> None:
        """Begin to measure: the files have so many compressed bytes."""
        self._started_s = time.monotonic()
        self._total = total

    def check(self) -> None:
        """Raise StoreError if the rest would take too long."""
        elapsed_s = time.monotonic() - self._started_s
        if not self._total or elapsed_s < MEASURE_S:
            return
        received = sum(path.stat().st_size for path in self._folder.iterdir())
        remaining_s = (self._total - received) * elapsed_s / max(received, 1)
        if remaining_s > MOST_REMAINING_S:
            why = f"it would take {remaining_s:.0f} s more, and a build is usually faster"
            raise StoreError(f"the link to the store is too slow: {why}")


def _load(folder: Path, store: MirrorStore, pace: _Pace, image_id: str, reference: str) -> None:
    if _has_image(reference, image_id):
        return  # loaded while this call waited
    content = store.read(build_image_key(f"{image_id}.json"))
    if content is None:
        raise StoreError("the store does not have it")
    blobs = _parse_record(content)
    # `docker load` writes all of the archive to the engine's disk, and then unpacks it.
    require_space(folder, sum(blob.size + 2 * blob.content_size for blob in blobs.values()))
    config_file = _fetch(store, blobs, image_id, folder)
    layers = _read_layers(config_file.path)
    pace.begin(sum(blobs[digest].size for digest in {image_id, *layers} & blobs.keys()))
    parts = {digest: _fetch(store, blobs, digest, folder) for digest in {*layers}}
    files = {f"{digest}.tar": parts[digest] for digest in parts}
    files[f"{image_id}.json"] = config_file
    names = [f"{digest}.tar" for digest in layers]
    entry = {"Config": f"{image_id}.json", "RepoTags": [reference], "Layers": names}
    _feed_engine(files, json.dumps([entry]).encode())
    if not _has_image(reference, image_id):
        raise StoreError("Docker did not load the image under its id")


def _parse_record(content: bytes) -> dict[str, StoredBlob]:
    try:
        blobs = decode(StoredImageRecord, content).blobs
    except MessageError:
        raise StoreError(_DAMAGED_RECORD) from None
    # A negative size would hide a large one from the check of the disk's space.
    if any(min(blob) < 0 for blob in blobs.values()):
        raise StoreError(_DAMAGED_RECORD)
    return blobs


def _has_image(reference: str, image_id: str) -> bool:
    image = inspect_image(reference)
    return image is not None and image.Id == PREFIX + image_id


class _FetchedBlob(NamedTuple):
    """A compressed file, and the size of its content."""

    path: Path
    size: int


def _fetch(
    store: MirrorStore, blobs: dict[str, StoredBlob], digest: str, folder: Path
) -> _FetchedBlob:
    """Fetch a compressed part of the image; StoreError unless its content has this hash."""
    blob, path = blobs.get(digest), folder / digest
    if blob is None:
        raise StoreError("the store's record of the image is incomplete")
    store.fetch(build_image_key(f"{digest}.gz"), path, blob.size)
    actual, size = hashlib.sha256(), 0
    with gzip.open(path, "rb") as file:
        # No further than the record says: a small file may unpack to a huge one.
        while size <= blob.content_size and (block := file.read(CHUNK)):
            size += len(block)
            actual.update(block)
    if actual.hexdigest() != digest:
        raise StoreError(f"images/{digest}.gz in the store is damaged")
    return _FetchedBlob(path, size)


def _read_layers(path: Path) -> list[str]:
    """Return the hashes of the layers that an image's configuration names."""
    with gzip.open(path, "rb") as file:
        content = file.read(_MOST_CONFIG_BYTES)
    try:
        return [parse_digest(digest) for digest in json.loads(content)["rootfs"]["diff_ids"]]
    except (KeyError, TypeError, RecursionError):
        raise StoreError("the id is not that of an image's configuration") from None


def _feed_engine(files: dict[str, _FetchedBlob], manifest: bytes) -> None:
    """Pass an archive of these files to `docker load`."""

    def write(stdin: IO[bytes]) -> None:
        with tarfile.open(fileobj=stdin, mode="w|") as archive:
            for name, part in files.items():
                with gzip.open(part.path, "rb") as content:
                    archive.addfile(_make_member(name, part.size), content)
            archive.addfile(_make_member("manifest.json", len(manifest)), io.BytesIO(manifest))

    try:
        feed_load(["docker", "load", "--quiet"], write)
    except DockerCommandError as error:
        raise StoreError(f"`docker load` failed: {error}") from None


def _make_member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member

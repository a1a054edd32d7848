"""Images of a lab in its store: an image that one server has built, for the lab's next server.

    images/<id>.json     a `StoredImageRecord`, written last
    images/<hash>.gz     a layer or a configuration, compressed; the hash is that of its content

An image's id is the hash of its configuration, which has the hashes of the layers. labctl records
the id when the image is built, so whatever else can write to the store cannot change the image:
a server loads only content that has these hashes, and passes nothing else to Docker.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Iterator, NamedTuple, cast

from ...wire.codec import MessageError, decode, encode
from ...wire.docker_archives import DockerCommandError, SavedArchive, feed_load, open_saved
from ...wire.images import (
    LOAD_STORED_IMAGE,
    SEND_STORED_IMAGE,
    LoadStoredImageReply,
    LoadStoredImageRequest,
    StoredBlob,
    StoredImageRecord,
    StoreImageRequest,
)
from ...wire.verbs import Empty, Reply, Request, Verb
from ..broker.detection import is_brokered
from ..files.files import RESERVE_BYTES
from ..host.background import build_scope_words
from ..host.engine import inspect_image, inspect_image_document
from ..host.paths import CHUNK, count_free_bytes, drop_tree, hash_file, lab_dir
from ..program import PROGRAM
from ..reply import Failure
from .mirror import lower_priority
from .store import MirrorStore, StoreError, can_use_store, open_store, read_config, rerun_with_boto3

_PREFIX = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
# bytes of an image's configuration; the largest are some hundred KiB
_MOST_CONFIG_BYTES = 16 * 1024 * 1024


def start_send(request: StoreImageRequest) -> Empty:
    """Start to send an image, in a process that outlives this call."""
    return _start(SEND_STORED_IMAGE, request)


def start_load(request: LoadStoredImageRequest) -> Empty:
    """Start to load an image, in a process that outlives this call; another load waits for it."""
    return _start(LOAD_STORED_IMAGE, request)


def _start(
    verb: Verb[Request, Reply], request: StoreImageRequest | LoadStoredImageRequest
) -> Empty:
    """Start a verb in the background, if this server has a store for images.

    An account that reaches the engine through a broker cannot read images of it.
    """
    root = lab_dir(request.lab, request.lab_id)
    if read_config(root).url and not is_brokered():
        program = [sys.executable, "-I", "-S", str(PROGRAM / "__main__.py")]
        log = root / "builds" / f"{verb.name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*build_scope_words(), *program, verb.name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        assert process.stdin
        with process.stdin as stdin:
            stdin.write(encode(request).encode() + b"\n")
    return Empty()


def send(request: StoreImageRequest) -> Empty:
    """Send an image to the lab's store. Failure (store) if the store or Docker refuses."""
    root = lab_dir(request.lab, request.lab_id)
    if not can_use_store(read_config(root).url):
        return rerun_with_boto3(SEND_STORED_IMAGE, request)
    lower_priority()
    try:
        with _open_folder(root, "send-image") as folder, _open(root, request) as store:
            image_id = _parse_digest(request.image_id)
            record = encode(StoredImageRecord(_send_blobs(folder, store, image_id)))
            store.write(_key(f"{image_id}.json"), record.encode())
    except (StoreError, DockerCommandError, OSError, tarfile.TarError) as error:
        raise Failure("store", "the image was not stored", str(error)) from None
    return Empty()


def load(request: LoadStoredImageRequest) -> LoadStoredImageReply:
    """Load an image from the lab's store, if its content has the hashes that the id implies."""
    root = lab_dir(request.lab, request.lab_id)
    url = read_config(root).url
    if not url or is_brokered():
        return LoadStoredImageReply("this server has no store for images")
    try:
        if not can_use_store(url):
            return rerun_with_boto3(LOAD_STORED_IMAGE, request)
        with _open_folder(root, "load-image") as folder, _open(root, request) as store:
            _load(folder, store, _parse_digest(request.image_id), request.reference)
    except Failure as failure:
        return LoadStoredImageReply(failure.report.why or failure.report.what)
    except (StoreError, OSError, EOFError, MessageError, ValueError, zlib.error) as error:
        return LoadStoredImageReply(str(error) or type(error).__name__)
    return LoadStoredImageReply("")


@contextmanager
def _open_folder(root: Path, name: str) -> Iterator[Path]:
    """Yield an empty directory that one process at a time has; a killed one has left its files."""
    folder = root / ".labctl" / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        drop_tree(folder)
        folder.mkdir()
        try:
            yield folder
        finally:
            drop_tree(folder)


@contextmanager
def _open(root: Path, request: StoreImageRequest | LoadStoredImageRequest) -> Iterator[MirrorStore]:
    store = open_store(root, request.lab, request.lab_id)
    try:
        yield store
    finally:
        store.close()


def _key(name: str) -> str:
    return f"images/{name}"


def _parse_digest(text: object) -> str:
    digest = str(text)[len(_PREFIX) :]
    if not str(text).startswith(_PREFIX) or not _DIGEST.match(digest):
        raise StoreError(f"{text!a} is not the id of an image")
    return digest


def _send_blobs(folder: Path, store: MirrorStore, image_id: str) -> dict[str, StoredBlob]:
    """Send the image's configuration and layers one by one; return them by their hashes."""
    document = inspect_image_document(_PREFIX + image_id)
    if document is None:
        raise StoreError("the server no longer has the image")
    _require_space(folder, int(document["Size"]))
    wanted = {image_id, *map(_parse_digest, document["RootFS"]["Layers"])}
    sent: dict[str, StoredBlob] = {}
    draft = folder / "draft"
    with open_saved(["docker", "save", _PREFIX + image_id]) as saved:
        for content, size in _iterate_files(saved):
            digest = _compress(content, draft)
            if digest in wanted - sent.keys():
                blob = StoredBlob(draft.stat().st_size, size)
                store.send(_key(f"{digest}.gz"), draft, blob.size, hash_file(draft))
                sent[digest] = blob
    if wanted - sent.keys():
        raise StoreError("`docker save` did not write all layers of the image")
    return sent


def _iterate_files(saved: SavedArchive) -> Iterator[tuple[IO[bytes], int]]:
    """Yield the files in an archive with their sizes; read the archive to its end."""
    # tarfile only calls read.
    with tarfile.open(fileobj=cast("IO[bytes]", saved), mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content:
                yield content, member.size
    while saved.read(CHUNK):
        pass


def _compress(content: IO[bytes], draft: Path) -> str:
    """Compress to `draft`, always to the same bytes; return the hash of the content."""
    digest = hashlib.sha256()
    with draft.open("wb") as raw, gzip.GzipFile("", "wb", 1, raw, mtime=0) as file:
        for block in iter(lambda: content.read(CHUNK), b""):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _load(folder: Path, store: MirrorStore, image_id: str, reference: str) -> None:
    if _has_image(reference, image_id):
        return  # loaded while this call waited
    content = store.read(_key(f"{image_id}.json"))
    if content is None:
        raise StoreError("the store does not have it")
    blobs = decode(StoredImageRecord, content).blobs
    # A negative size would hide a large one from the check of the disk's space.
    if any(min(blob) < 0 for blob in blobs.values()):
        raise StoreError("the store's record of the image is damaged")
    _require_space(folder, sum(blob.size + blob.content_size for blob in blobs.values()))
    config_file = _fetch(store, blobs, image_id, folder)
    layers = _read_layers(config_file.path)
    parts = {digest: _fetch(store, blobs, digest, folder) for digest in {*layers}}
    files = {f"{digest}.tar": parts[digest] for digest in parts}
    files[f"{image_id}.json"] = config_file
    names = [f"{digest}.tar" for digest in layers]
    entry = {"Config": f"{image_id}.json", "RepoTags": [reference], "Layers": names}
    _feed_engine(files, json.dumps([entry]).encode())
    if not _has_image(reference, image_id):
        raise StoreError("Docker did not load the image under its id")


def _has_image(reference: str, image_id: str) -> bool:
    image = inspect_image(reference)
    return image is not None and image.Id == _PREFIX + image_id


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
    store.fetch(_key(f"{digest}.gz"), path, blob.size)
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
        config = json.loads(file.read(_MOST_CONFIG_BYTES))
    return [_parse_digest(digest) for digest in config["rootfs"]["diff_ids"]]


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


def _require_space(folder: Path, size: int) -> None:
    if count_free_bytes(folder) < size + RESERVE_BYTES:
        raise StoreError("the server's disk has no room for a copy of the image")

"""Sending an image that this server has built to the lab's store, layer by layer."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from pathlib import Path
from typing import IO, Iterator, cast

from ...wire.codec import encode
from ...wire.docker_archives import DockerCommandError, SavedArchive, open_saved
from ...wire.images import SEND_STORED_IMAGE, StoredBlob, StoredImageRecord, StoreImageRequest
from ...wire.verbs import Empty
from ..host.engine import inspect_image_document
from ..host.paths import CHUNK, hash_file, lab_dir
from ..reply import Failure
from .images import (
    PREFIX,
    build_image_key,
    open_folder,
    open_lab_store,
    parse_digest,
    require_space,
)
from .mirror import lower_priority
from .store import MirrorStore, StoreError, can_use_store, read_config, rerun_with_boto3


def send(request: StoreImageRequest) -> Empty:
    """Send an image to the lab's store. Failure (store) if the store or Docker refuses."""
    root = lab_dir(request.lab, request.lab_id)
    if not can_use_store(read_config(root).url):
        return rerun_with_boto3(SEND_STORED_IMAGE, request)
    lower_priority()
    try:
        with open_folder(root, "send-image") as folder, open_lab_store(root, request) as store:
            image_id = parse_digest(request.image_id)
            record = encode(StoredImageRecord(_send_blobs(folder, store, image_id)))
            store.write(build_image_key(f"{image_id}.json"), record.encode())
    except (StoreError, DockerCommandError, OSError, tarfile.TarError) as error:
        raise Failure("store", "the image was not stored", str(error)) from None
    return Empty()


def _send_blobs(folder: Path, store: MirrorStore, image_id: str) -> dict[str, StoredBlob]:
    """Send the image's configuration and layers one by one; return them by their hashes."""
    document = inspect_image_document(PREFIX + image_id)
    if document is None:
        raise StoreError("the server no longer has the image")
    # `docker save` writes all of the image to the engine's disk first.
    require_space(folder, 2 * int(document["Size"]))
    wanted = {image_id, *map(parse_digest, document["RootFS"]["Layers"])}
    sent: dict[str, StoredBlob] = {}
    draft = folder / "draft"
    with open_saved(["docker", "save", PREFIX + image_id]) as saved:
        for content, size in _iterate_files(saved):
            digest = _compress(content, draft)
            if digest in wanted - sent.keys():
                blob = StoredBlob(draft.stat().st_size, size)
                store.send(build_image_key(f"{digest}.gz"), draft, blob.size, hash_file(draft))
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

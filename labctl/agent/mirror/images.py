"""Images of a lab in its store: an image that one server has built, for the lab's next server.

    images/<id>.json     a `StoredImageRecord`, written last
    images/<hash>.gz     a layer or a configuration, compressed; the hash is that of its content

An image's id is the hash of its configuration, which has the hashes of the layers. labctl records
the id when the image is built, so whatever else can write to the store cannot change the image:
a server loads only content that has these hashes, and passes nothing else to Docker.

`image_upload` sends an image, and `image_download` loads one; both may take long. This module
starts them, and has what they share.
"""

from __future__ import annotations

import fcntl
import re
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from ...wire.codec import encode
from ...wire.images import (
    LOAD_STORED_IMAGE,
    SEND_STORED_IMAGE,
    LoadStoredImageRequest,
    StoreImageRequest,
)
from ...wire.verbs import Empty, Reply, Request, Verb
from ..broker.detection import is_brokered
from ..files.files import RESERVE_BYTES
from ..host.background import BackgroundShell
from ..host.paths import count_free_bytes, drop_tree, lab_dir
from ..program import PROGRAM
from .store import MirrorStore, Progress, StoreError, open_store, read_config

PREFIX = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


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
        program = [sys.executable, "-I", "-S", str(PROGRAM / "__main__.py"), verb.name]
        log = root / "builds" / f"{verb.name}.log"
        log.parent.mkdir(exist_ok=True)
        line = f"exec {shlex.join(program)} >{shlex.quote(str(log))} 2>&1"
        with BackgroundShell() as shell:
            shell.run(f"{line} <<'REQUEST'\n{encode(request)}\nREQUEST")
    return Empty()


@contextmanager
def open_folder(root: Path, name: str) -> Iterator[Path]:
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
def open_lab_store(
    root: Path,
    request: StoreImageRequest | LoadStoredImageRequest,
    progress: Progress = lambda: None,
) -> Iterator[MirrorStore]:
    """Yield the lab's store, which is closed afterwards."""
    store = open_store(root, request.lab, request.lab_id, progress)
    try:
        yield store
    finally:
        store.close()


def build_image_key(name: str) -> str:
    return f"images/{name}"


def parse_digest(text: object) -> str:
    """Return the hash in `sha256:HASH`. StoreError for anything else, since it becomes a key."""
    digest = str(text)[len(PREFIX) :]
    if not str(text).startswith(PREFIX) or not _DIGEST.match(digest):
        raise StoreError(f"{text!a} is not the id of an image")
    return digest


def require_space(folder: Path, size: int) -> None:
    if count_free_bytes(folder) < size + RESERVE_BYTES:
        raise StoreError("the server's disk has no room for a copy of the image")

"""Built images that this machine keeps, as uncompressed `docker save` archives.

    <digest>-<architecture>.tar      the archive
    <digest>-<architecture>.json     its record: size, SHA-256, name and architecture of the image
    <digest>-<architecture>.error    why the image could not be kept

An archive without a record is ignored; the record is written last. Only one process at a time adds
archives, so an unfinished one that it finds was left by a process that has died.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from labctl.config.identity import write_private
from labctl.decoding import decode_json
from labctl.errors import DiskFullError, TransferError
from labctl.model import Value
from labctl.state.locks import hold_lock
from labctl.text import bytes_text

# free space that stays on the disk, whatever the limit is
RESERVE_BYTES = 2 * 10**9
CHUNK_BYTES = 1 << 20
# seconds that a process waits while others write archives
WRITE_S = 3600.0
_UNFINISHED = ".part"
# bytes of the manifest, or of an image's configuration; the largest are some hundred KiB
MOST_DOCUMENT_BYTES = 16 * 1024**2
# Errors of JSON of another shape. A server's root decides what is in an archive.
_NOT_A_DOCUMENT = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class DamagedArchiveError(TransferError):
    """An archive differs from its record."""


class CachedImage(Value, frozen=True):
    """An archive and what it must contain. `architecture` is Docker's name, such as amd64."""

    reference: str
    architecture: str
    size_bytes: int
    sha256: str
    saved_at: float


class ImageCache:
    """The archives in `directory`, which the first `add` creates. A limit of 0 bytes keeps none."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes

    def path(self, image: CachedImage) -> Path:
        return self._stem(image.reference, image.architecture).with_suffix(".tar")

    def find(self, reference: str, architecture: str = "") -> CachedImage | None:
        """Return the image for this architecture ("" for any); None if it is not in the cache."""
        matches = [image for image in self.list_images() if image.reference == reference]
        return next((i for i in matches if architecture in ("", i.architecture)), None)

    def list_images(self) -> list[CachedImage]:
        """List the complete archives, the least recently used first."""
        images = [image for file in self._list("*.json") if (image := self._read(file))]
        return sorted(images, key=self.get_last_use)

    def get_last_use(self, image: CachedImage) -> float:
        """Return when the archive was last loaded or saved (Unix seconds); 0 if it was removed."""
        with suppress(FileNotFoundError):
            return self.path(image).stat().st_mtime
        return 0.0

    def add(self, reference: str, architecture: str, blocks: Iterable[bytes]) -> CachedImage:
        """Store an archive, completely or not at all. Call `make_room` first.

        TransferError if it is not the archive of this image, DiskFullError if the disk is full.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock, what = self.directory / "write.lock", f"keeping the image {reference}"
        with hold_lock(lock, what, wait_s=WRITE_S, is_command=False):
            self._remove_unfinished()
            draft = self._stem(reference, architecture).with_suffix(_UNFINISHED)
            try:
                image = self._write(draft, reference, architecture, blocks)
                _require_image(draft, reference)
                self.remove(image)
                draft.replace(self.path(image))
            finally:
                draft.unlink(missing_ok=True)
            write_private(self.path(image).with_suffix(".json"), msgspec.json.encode(image))
        return image

    def make_room(self, size_bytes: int) -> None:
        """Remove the least recently used archives until `size_bytes` fit.

        DiskFullError if they cannot fit; then nothing is removed.
        """
        images = self.list_images()
        used = sum(image.size_bytes for image in images)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(self.directory).free
        if size_bytes > min(self.limit_bytes, free + used - RESERVE_BYTES):
            raise self._make_full_error(size_bytes)
        while images and size_bytes > min(self.limit_bytes - used, free - RESERVE_BYTES):
            self.remove(images[0])
            used -= images[0].size_bytes
            free += images.pop(0).size_bytes

    def _make_full_error(self, size_bytes: int) -> DiskFullError:
        return DiskFullError(
            f"{self.directory} has no room for {bytes_text(size_bytes)}",
            why=f"the limit is {bytes_text(self.limit_bytes)}, and "
            f"{bytes_text(RESERVE_BYTES)} of the disk must stay free",
            hint="set image_cache in config.yaml, or free disk space",
        )

    def mark_used(self, image: CachedImage) -> None:
        with suppress(FileNotFoundError):
            os.utime(self.path(image))

    def remove(self, image: CachedImage) -> None:
        """Remove an archive; its record first, so that an interrupted removal leaves none."""
        self.path(image).with_suffix(".json").unlink(missing_ok=True)
        self.path(image).unlink(missing_ok=True)

    def record_failure(self, reference: str, text: str) -> None:
        """Store why an image could not be kept, for `labctl images` or the `up` of its lab."""
        with suppress(OSError):  # a full disk has no room for its own message either
            write_private(self._stem(reference, "").with_suffix(".error"), text.encode())

    def take_failures(self, reference: str = "") -> list[str]:
        """Return the stored failures, by default those of all images, and delete them."""
        texts = []
        pattern = self._stem(reference, "").name if reference else "*"
        for file in self._list(f"{pattern}.error"):
            with suppress(FileNotFoundError):
                texts.append(file.read_text(errors="replace"))
                file.unlink()
        return texts

    def _write(
        self, draft: Path, reference: str, architecture: str, blocks: Iterable[bytes]
    ) -> CachedImage:
        digest, size = hashlib.sha256(), 0
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for block in blocks:
                    size += len(block)
                    self._require_space(size, len(block))
                    file.write(block)
                    digest.update(block)
                file.flush()
                os.fsync(descriptor)
        except OSError as error:
            raise DiskFullError(
                f"cannot write {draft}", why=error.strerror or "", hint="df -h ~/.cache"
            ) from error
        return CachedImage(
            reference=reference,
            architecture=architecture,
            size_bytes=size,
            sha256=digest.hexdigest(),
            saved_at=time.time(),
        )

    def _remove_unfinished(self) -> None:
        """Remove what killed processes left: drafts, and archives without a record."""
        for stale in self._list(f"*{_UNFINISHED}"):
            stale.unlink(missing_ok=True)
        for archive in self._list("*.tar"):
            if not archive.with_suffix(".json").exists():
                archive.unlink(missing_ok=True)

    def _require_space(self, size_bytes: int, block_bytes: int) -> None:
        """DiskFullError if an archive of which so much has arrived becomes too large.

        The server only estimates its size beforehand.
        """
        free = shutil.disk_usage(self.directory).free
        if size_bytes > self.limit_bytes or block_bytes + RESERVE_BYTES > free:
            raise self._make_full_error(size_bytes)

    def _stem(self, reference: str, architecture: str) -> Path:
        tag = reference.rpartition(":")[2]
        return self.directory / (f"{tag}-{architecture}" if architecture else tag)

    def _list(self, pattern: str) -> list[Path]:
        return sorted(self.directory.glob(pattern)) if self.directory.is_dir() else []

    def _read(self, file: Path) -> CachedImage | None:
        """Return a record whose archive has its size; None for anything else."""
        try:
            image = decode_json(file.read_bytes(), CachedImage)
            complete = self.path(image).stat().st_size == image.size_bytes
        except (OSError, msgspec.MsgspecError):
            return None
        return image if complete and self.path(image).with_suffix(".json") == file else None


def read_verified(path: Path, image: CachedImage) -> Iterator[bytes]:
    """Yield an archive's blocks; DamagedArchiveError before the last two if its hash differs.

    `docker load` needs the end of the archive, so it never accepts a damaged one, although the file
    is read only once. The last block alone may be nothing but the zeros that end a tar file.
    """
    digest, held = hashlib.sha256(), deque[bytes]()
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            digest.update(block)
            held.append(block)
            if len(held) > 2:
                yield held.popleft()
    if digest.hexdigest() != image.sha256:
        raise DamagedArchiveError(
            f"{path} is damaged", why="its SHA-256 hash differs from its record"
        )
    yield from held


def _require_image(archive: Path, reference: str) -> None:
    """Raise TransferError unless the archive is complete and contains exactly this image.

    A second name in it would replace another image of each server that loads it.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            names = set(tar.getnames())
            (entry,) = json.loads(_read_document(tar, "manifest.json"))
            content = _read_document(tar, entry["Config"])
        digest = entry["Config"].rpartition("/")[2].removesuffix(".json")
        has_config = hashlib.sha256(content).hexdigest() == digest
        is_complete = has_config and names.issuperset(entry["Layers"])
        is_named = entry["RepoTags"] == [reference]
    except (tarfile.TarError, ArithmeticError, *_NOT_A_DOCUMENT) as error:
        raise TransferError("`docker save` sent no usable archive", why=str(error)) from error
    if not is_complete or not is_named:
        why = "a layer is missing" if not is_complete else f"it does not contain {reference} alone"
        raise TransferError("`docker save` sent no usable archive", why=why)


def _read_document(archive: tarfile.TarFile, name: str) -> bytes:
    """Return the content of a JSON file in an archive, cut off if it is too large for one."""
    file = archive.extractfile(name)
    return file.read(MOST_DOCUMENT_BYTES) if file else b""

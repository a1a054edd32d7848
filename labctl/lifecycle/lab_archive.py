"""The archive in which a lab is exported: one tar stream, its first member a `LabExport`.

parcel.json         the LabExport; only it holds secrets and the lab's private key
files/<path>        files of the lab's directory that the keeper does not have yet
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.decoding import decode_json
from labctl.errors import DiskFullError, TransferError
from labctl.lazy import lazy_imports
from labctl.lifecycle.kept_labs import KeptLab
from labctl.model import Run, Server, Value
from labctl.state.ledgers import LedgerLine
from labctl.sync.containment import require_contained
from labctl.text import bytes_text
from labctl.wire.tar import TarError, TarStream

with lazy_imports(__name__):
    from importlib import metadata

HEAD = "parcel.json"
FILES = "files/"
MOST_HEAD_BYTES = 64 * 1024**2
RESERVE_BYTES = 64 * 1024**2
CHUNK_BYTES = 1024 * 1024


def labctl_version() -> str:
    """Return labctl's version: the exporting and the importing side must have the same."""
    return metadata.version("labctl")


class MemberExport(Value, frozen=True):
    """One of the other servers of a lab that has several, with what the laptop knows of it."""

    server: Server
    runs: tuple[Run, ...] = ()
    ledger: tuple[LedgerLine, ...] = ()


class LabExport(Value, frozen=True):
    """An exported lab. `kept_lab.files` also names the files that the archive leaves out.

    `key` is the private key for its servers, "" if labctl has none. `runs` and `ledger` are what
    the laptop knows. `members` are the lab's servers beside the first one.
    """

    version: str
    kept_lab: KeptLab = msgspec.field(name="ward")
    server: Server
    runs: tuple[Run, ...] = ()
    ledger: tuple[LedgerLine, ...] = ()
    secrets: dict[str, str] = msgspec.field(default_factory=dict)
    key: str = ""
    members: tuple[MemberExport, ...] = ()


def write_export(stream: BinaryIO, parcel: LabExport, files: Mapping[str, Path]) -> None:
    """Write the parcel and these files (path in the lab -> local path) to `stream`."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        head = msgspec.json.encode(parcel)
        archive.addfile(_member(HEAD, len(head)), io.BytesIO(head))
        for path, local in files.items():
            size, _ = parcel.kept_lab.files[path]
            with local.open("rb") as file:
                if os.fstat(file.fileno()).st_size < size:
                    raise _make_changed_error(path)
                archive.addfile(_member(FILES + path, size), file)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    return member


def _make_changed_error(path: str) -> TransferError:
    return TransferError(
        f"{path} changed while it was being sent", hint="labctl run --recover --keeper"
    )


class LabExportReader:
    """Reads an archive.

    `parcel` is read at once; `extract_files` writes the other members to disk.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = TarStream(stream)
        self._members = iter(self._stream)
        try:
            member = next(self._members, None)
            if member is None or member.name != HEAD or not 0 < member.size <= MOST_HEAD_BYTES:
                raise TransferError("the received archive is not an exported lab")
            self.parcel = decode_json(self._stream.read(member.size), LabExport)
        except (TarError, msgspec.MsgspecError) as error:
            raise TransferError(
                "the received archive is not an exported lab", why=str(error)
            ) from error

    def extract_files(self, staging: Path) -> set[str]:
        """Write the archive's files below `staging`, verify them, and return their paths.

        PolicyError for a path outside of it, TransferError for content other than announced.
        """
        announced = self.parcel.kept_lab.files
        written: set[str] = set()
        try:
            for member in self._members:
                path = require_contained(member.name.removeprefix(FILES))
                is_file = member.kind == tarfile.REGTYPE and member.name.startswith(FILES)
                if not is_file or path not in announced:
                    raise TransferError(
                        f"the archive contains {member.name!a} without announcing it"
                    )
                _require_space(staging, member.size)
                self._extract(path, staging / path, announced[path])
                written.add(path)
        except TarError as error:
            raise TransferError("the received archive is incomplete", why=str(error)) from error
        return written

    def _extract(self, path: str, target: Path, announced: tuple[int, str]) -> None:
        digest, size = hashlib.sha256(), 0
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            while block := self._stream.read(CHUNK_BYTES):
                digest.update(block)
                size += file.write(block)
        if (size, digest.hexdigest()) != announced:
            raise _make_changed_error(path)


def _require_space(staging: Path, size: int) -> None:
    usage = os.statvfs(staging)
    free = usage.f_bavail * usage.f_frsize
    if size + RESERVE_BYTES > free:
        raise DiskFullError(
            "the keeper's disk is too full for the lab", why=f"{bytes_text(free)} is free"
        )

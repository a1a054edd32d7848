"""What travels when a lab is handed over: one tar stream, its first member a `Parcel`.

parcel.json         the Parcel; it alone holds secrets and the lab's private key
files/<path>        files of the ward's directory that the keeper does not have yet
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

from labctl.errors import DiskFullError, TransferError
from labctl.lifecycle.kept_labs import Ward
from labctl.model import Run, Server, Value
from labctl.state.ledgers import Line
from labctl.sync.containment import contained

HEAD = "parcel.json"
FILES = "files/"
MOST_HEAD_BYTES = 64 * 1024**2
RESERVE_BYTES = 64 * 1024**2
CHUNK_BYTES = 1024 * 1024


def version() -> str:
    """Of labctl: both sides of a hand-over must be of the same."""
    from importlib.metadata import version as installed

    return installed("labctl")


class Parcel(Value, frozen=True):
    """A lab as it is handed over. `ward.files` names every file of it; not all need travel.

    `key` is the private key that opens its servers, "" where labctl has none. `runs` and `ledger`
    are what the laptop knows.
    """

    version: str
    ward: Ward
    server: Server
    runs: tuple[Run, ...] = ()
    ledger: tuple[Line, ...] = ()
    secrets: dict[str, str] = msgspec.field(default_factory=dict)
    key: str = ""


def write(stream: BinaryIO, parcel: Parcel, places: Mapping[str, Path]) -> None:
    """The parcel and the files at `places` (path in the ward -> where it lies here)."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        head = msgspec.json.encode(parcel)
        archive.addfile(_member(HEAD, len(head)), io.BytesIO(head))
        for path, place in places.items():
            size, _ = parcel.ward.files[path]
            with place.open("rb") as file:
                if os.fstat(file.fileno()).st_size < size:
                    raise _changed(path)
                archive.addfile(_member(FILES + path, size), file)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    return member


def _changed(path: str) -> TransferError:
    return TransferError(f"{path} changed while it was sent", hint="labctl run --recover --keeper")


class Unpacking:
    """A parcel on its way in. `parcel` is read at once, `files` puts the rest where it belongs."""

    def __init__(self, stream: BinaryIO) -> None:
        try:
            self._archive = tarfile.open(fileobj=stream, mode="r|")  # noqa: SIM115 (read in parts)
            member = self._archive.next()
            if member is None or member.name != HEAD or not 0 < member.size <= MOST_HEAD_BYTES:
                raise TransferError("what arrived is no lab")
            head = self._archive.extractfile(member)
            self.parcel = msgspec.json.decode(head.read() if head else b"", type=Parcel)
        except (tarfile.TarError, msgspec.MsgspecError) as error:
            raise TransferError("what arrived is no lab", why=str(error)) from error

    def files(self, staging: Path) -> set[str]:
        """Every file that travelled, verified, below `staging`; their paths.

        PolicyError for a name that leaves it, TransferError for content that was not promised.
        """
        wanted = self.parcel.ward.files
        arrived: set[str] = set()
        try:
            while (member := self._archive.next()) is not None:
                path = contained(member.name.removeprefix(FILES))
                if not member.isreg() or not member.name.startswith(FILES) or path not in wanted:
                    raise TransferError(f"{member.name!a} arrived, which was not announced")
                _room(staging, member.size)
                self._place(member, staging / path, wanted[path])
                arrived.add(path)
        except tarfile.TarError as error:
            raise TransferError("the lab did not arrive whole", why=str(error)) from error
        return arrived

    def _place(self, member: tarfile.TarInfo, place: Path, known: tuple[int, str]) -> None:
        source, digest, size = self._archive.extractfile(member), hashlib.sha256(), 0
        assert source is not None
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            while block := source.read(CHUNK_BYTES):
                digest.update(block)
                size += file.write(block)
        if (size, digest.hexdigest()) != known:
            raise _changed(member.name.removeprefix(FILES))


def _room(staging: Path, size: int) -> None:
    found = os.statvfs(staging)
    free = found.f_bavail * found.f_frsize
    if size + RESERVE_BYTES > free:
        raise DiskFullError(
            "the keeper's disk has no room for the lab", why=f"{free // 1024**2} MiB are free"
        )

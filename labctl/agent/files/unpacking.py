"""Unpacking untrusted archives: only regular files and directories below one directory."""

from __future__ import annotations

import stat
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

from ...wire.containment import is_contained
from ...wire.verbs import SHOW_DISK
from ..host.paths import CHUNK, count_free_bytes, resolve_inside
from ..reply import Failure
from .files import RESERVE_BYTES

TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2")


def is_archive(name: str) -> bool:
    return name.lower().endswith((".zip", *TARS))


def unpack(archive: Path, name: str, into: Path) -> tuple[int, int]:
    """Unpack an archive of the kind that `name` shows; return (files, links and devices skipped).

    Failure for names that leave `into`, for more bytes than the disk has room for, and for a
    damaged archive.
    """
    room = count_free_bytes(into) - RESERVE_BYTES
    try:
        if name.lower().endswith(".zip"):
            return _unzip(archive, into, room)
        return _untar(archive, into, room)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise Failure("link", f"{name} is damaged or not an archive", str(error)) from None


def _untar(archive: Path, into: Path, room: int) -> tuple[int, int]:
    files = left_out = 0
    with tarfile.open(str(archive), "r:*") as tar:
        for member in tar:
            name = _check_member_name(member.name)
            if member.isdir():
                if name:
                    resolve_inside(into, name).mkdir(parents=True, exist_ok=True)
            elif member.isreg():
                content = tar.extractfile(member)
                if content is None:
                    raise tarfile.TarError(f"no content for {name!r}")
                room = _extract_file(content, into, name, member.size, room)
                files += 1
            else:
                left_out += 1
    return files, left_out


def _unzip(archive: Path, into: Path, room: int) -> tuple[int, int]:
    files = left_out = 0
    with zipfile.ZipFile(str(archive)) as zipped:
        for info in zipped.infolist():
            name = _check_member_name(info.filename)
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                if name:
                    resolve_inside(into, name).mkdir(parents=True, exist_ok=True)
            elif kind not in (0, stat.S_IFREG):
                left_out += 1
            else:
                with zipped.open(info) as content:
                    room = _extract_file(content, into, name, info.file_size, room)
                files += 1
    return files, left_out


def _check_member_name(name: str) -> str:
    """Return the name without leading `./` and trailing `/`. Failure for one that leaves `into`."""
    while name.startswith("./"):
        name = name[2:]
    name = name.rstrip("/")
    if name in ("", "."):
        return ""
    is_odd = any(ord(c) < 32 or ord(c) == 127 for c in name) or "\\" in name
    if is_odd or not is_contained(name):
        what = f"the archive contains {name!r}, which leaves its directory"
        raise Failure("policy", what)
    return name


def _extract_file(content: IO[bytes], into: Path, name: str, size: int, room: int) -> int:
    """Write at most `size` bytes, as the archive declared; return the remaining room in bytes."""
    if size > room:
        raise Failure(
            "disk",
            "the server's disk has no room for the unpacked archive",
            f"{name!r} alone has {size} bytes, and {max(0, room)} bytes are available",
            SHOW_DISK,
        )
    path = resolve_inside(into, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        remaining = size
        while remaining > 0:
            block = content.read(min(CHUNK, remaining))
            if not block:
                break
            file.write(block)
            remaining -= len(block)
    if remaining or content.read(1):
        raise Failure("link", f"{name!r} in the archive does not have its declared size")
    return room - size

"""Downloads: the hashes of a run's files, and their bytes where rsync is not available."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import Any, Iterator

from ..host.paths import (
    CHUNK,
    HASHES,
    hash_file,
    lab_dir,
    read_json,
    resolve_inside,
    run_dir,
    write_json,
)
from ..reply import send_closing_reply, send_reply


def hashes(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"sha256": [...]} for each of "parts" ([path, size]) of a run, in their order.

    "" for a file that differs from what `manifest` listed, before or after it is read.
    """
    base = _base_directory(request)
    path = base / HASHES
    cached = read_json(path)
    entries = {
        name: _hash(base, name, int(size), cached.get(name)) for name, size in request["parts"]
    }
    fresh = {name: entry for name, entry in entries.items() if entry and entry != cached.get(name)}
    if fresh:
        write_json(path, {**read_json(path), **fresh})
    ordered = (entries[name] for name, _ in request["parts"])
    return {"sha256": [entry[2] if entry else "" for entry in ordered]}


def send(request: dict[str, Any]) -> None:
    """Reply, then send the first `size` bytes of each of "parts" ([path, size]), one after another.

    Zeros are sent for what cannot be read: its hash will not match. "run" "" means the lab's code.
    """
    base = _base_directory(request)
    send_reply({})
    for name, size in request["parts"]:
        for block in _read_blocks(base, name, int(size)):
            sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    send_closing_reply({})


def _base_directory(request: dict[str, Any]) -> Path:
    root = lab_dir(request["lab"], request["lab_id"])
    base = run_dir(root, request["run"]) if request.get("run") else root / "code"
    for name, _ in request["parts"]:
        resolve_inside(base, name)
    return base


def _hash(base: Path, name: str, size: int, entry: list[Any] | None) -> list[Any]:
    """Return [size, mtime_ns, sha256] of a file that still matches `entry`, otherwise []."""
    if entry is None or entry[0] != size or _identity(base / name) != entry[:2]:
        return []
    if entry[2]:
        return entry
    try:
        hashed = [*entry[:2], hash_file(base / name)]
    except OSError:
        return []
    return hashed if _identity(base / name) == entry[:2] else []


def _identity(path: Path) -> list[int]:
    try:
        status = path.lstat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns] if stat.S_ISREG(status.st_mode) else []


def _read_blocks(base: Path, name: str, size: int) -> Iterator[bytes]:
    """Yield exactly `size` bytes, zeros for what cannot be read."""
    remaining = size
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(resolve_inside(base, name), flags)
        try:
            while stat.S_ISREG(os.fstat(descriptor).st_mode) and remaining:
                block = os.read(descriptor, min(CHUNK, remaining))
                if not block:
                    break
                remaining -= len(block)
                yield block
        finally:
            os.close(descriptor)
    while remaining:
        block = bytes(min(CHUNK, remaining))
        remaining -= len(block)
        yield block

"""Files out: the hashes of what a pull takes, and their bytes where rsync cannot carry them."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import Any, Iterator

from ..host.paths import CHUNK, HASHES, inside, lab_dir, read_json, run_dir, sha256_of, write_json
from ..reply import answer, finish


def hashes(request: dict[str, Any]) -> dict[str, Any]:
    """The sha256 of each of "parts" ([path, size]) of a run: "sha256", in their order.

    "" for a file that is not the one that `manifest` saw, before or after it is read.
    """
    base = _base(request)
    path = base / HASHES
    known = read_json(path)
    found = {name: _hash(base, name, int(size), known.get(name)) for name, size in request["parts"]}
    fresh = {name: entry for name, entry in found.items() if entry and entry != known.get(name)}
    if fresh:
        write_json(path, {**read_json(path), **fresh})
    entries = (found[name] for name, _ in request["parts"])
    return {"sha256": [entry[2] if entry else "" for entry in entries]}


def send(request: dict[str, Any]) -> None:
    """The first `size` bytes of each of "parts" ([path, size]), one after another, after a reply.

    What cannot be read is sent as zeros: the hash tells. "run" "" means the lab's code.
    """
    base = _base(request)
    answer({})
    for name, size in request["parts"]:
        for block in _contents(base, name, int(size)):
            sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    finish({})


def _base(request: dict[str, Any]) -> Path:
    root = lab_dir(request["lab"], request["lab_id"])
    base = run_dir(root, request["run"]) if request.get("run") else root / "code"
    for name, _ in request["parts"]:
        inside(base, name)
    return base


def _hash(base: Path, name: str, size: int, seen: list[Any] | None) -> list[Any]:
    """[size, mtime_ns, sha256] of a file that is as it was `seen`; [] if it is not."""
    if seen is None or seen[0] != size or _identity(base / name) != seen[:2]:
        return []
    if seen[2]:
        return seen
    try:
        entry = [*seen[:2], sha256_of(base / name)]
    except OSError:
        return []
    return entry if _identity(base / name) == seen[:2] else []


def _identity(path: Path) -> list[int]:
    try:
        found = path.lstat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns] if stat.S_ISREG(found.st_mode) else []


def _contents(base: Path, name: str, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes."""
    left = size
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(inside(base, name), flags)
        try:
            while stat.S_ISREG(os.fstat(descriptor).st_mode) and left:
                block = os.read(descriptor, min(CHUNK, left))
                if not block:
                    break
                left -= len(block)
                yield block
        finally:
            os.close(descriptor)
    while left:
        block = bytes(min(CHUNK, left))
        left -= len(block)
        yield block

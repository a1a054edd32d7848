"""Files out: what a pull asked for as one stream, hashed while it is read."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path
from typing import Any

from .landing import take_in
from .outgoing import Outgoing
from .parcel import CutError
from .place import HASHES, inside, lab_dir, read_json, run_dir, write_json
from .reply import answer, finish


def send(request: dict[str, Any]) -> None:
    """Files below the run (or the code, where "run" is ""), as a stream of blocks (parcel.py)
    between two replies.

    "parts" are [path, size, sha256, offset, have] each: `have` is the hash of the first `offset`
    bytes that the client holds. The first reply's "from" says where each begins: at `offset` where
    these bytes are the same here, else at 0; -1 where there is no such file. Each goes up to its
    `size`. The second reply's "sha256" has the hashes of those for which none was asked ("" else,
    and where a file is not the one that `manifest` saw).
    """
    root = lab_dir(request["lab"], request["lab_id"])
    base = run_dir(root, request["run"]) if request.get("run") else root / "code"
    files = [_File(base, *part) for part in request["parts"]]
    there = [one for one in files if one.start >= 0]
    answer({"from": [one.start for one in files]})
    parts = [(one.path, one.start, one.size) for one in there]
    out = sys.stdout.buffer
    outgoing = Outgoing(base, parts, _unheard, [one.digest for one in there])
    for piece in outgoing():
        out.write(piece)
    out.flush()
    for one, digest in zip(there, outgoing.digests):
        one.digest = digest
    finish({"sha256": _told(base, files)})


def _unheard(done: int) -> None:
    """The client counts for itself."""


class _File:
    """One part: where it begins, and the hash of what goes out of it, where that is to be told."""

    def __init__(
        self, base: Path, path: str, size: int, sha256: str, offset: int, have: str
    ) -> None:
        self.path = path
        self.size = int(size)
        self.start = -1
        self.hashed = not sha256
        self.digest: Any = None
        try:
            descriptor = os.open(inside(base, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                self.start = self._begin(descriptor, int(offset), have)
        finally:
            os.close(descriptor)

    def _begin(self, descriptor: int, offset: int, have: str) -> int:
        self.digest = hashlib.sha256() if self.hashed else None
        if not 0 < offset <= self.size:
            return 0
        digest = hashlib.sha256()
        try:
            take_in(descriptor, digest, offset)
        except CutError:
            return 0
        if digest.hexdigest() != have:
            return 0
        if self.hashed:
            self.digest = digest
        return offset


def _told(base: Path, files: list[_File]) -> list[str]:
    """The hashes of files that stood still since `manifest` noted their size and time."""
    path = base / HASHES
    known = read_json(path) if any(one.hashed for one in files) else {}
    found: dict[str, list[Any]] = {}
    for one in files:
        seen = known.get(one.path)
        if one.digest is None or seen is None:
            continue
        try:
            now = os.lstat(base / one.path)
        except OSError:
            continue
        if seen[:2] == [one.size, now.st_mtime_ns] and now.st_size == one.size:
            found[one.path] = [*seen[:2], one.digest.hexdigest()]
    if found:
        write_json(path, {**read_json(path), **found})
    return [found[one.path][2] if one.path in found else "" for one in files]

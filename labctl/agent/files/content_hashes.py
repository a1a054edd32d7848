"""Downloads: the hashes of files on the server."""

from __future__ import annotations

import stat
from pathlib import Path

from ...wire.files import HashesReply, HashRecord, PartsRequest
from ..host.paths import HASHES, hash_file, lab_dir, resolve_inside, run_dir
from .records import merge_records, read_records


def hashes(request: PartsRequest) -> HashesReply:
    """Hash parts of the files of a run, of the code, or of the home directory."""
    base = _base_directory(request)
    if request.home or not request.run:
        # Nothing about them is recorded: they are not labctl's.
        paths = [(base / part.path, part.size) for part in request.parts]
        current = [_hash(path, size, _stat(path)) for path, size in paths]
        return HashesReply(tuple(record.sha256 if record else "" for record in current))
    path = base / HASHES
    cached = read_records(HashRecord, path)
    hashed = {
        part.path: _hash(base / part.path, part.size, cached.get(part.path))
        for part in request.parts
    }
    records = {name: record for name, record in hashed.items() if record is not None}
    fresh = {name: record for name, record in records.items() if record != cached.get(name)}
    if fresh:
        merge_records(HashRecord, path, fresh)
    ordered = (hashed[part.path] for part in request.parts)
    return HashesReply(tuple(record.sha256 if record else "" for record in ordered))


def _base_directory(request: PartsRequest) -> Path:
    root = lab_dir(request.lab, request.lab_id)
    base = run_dir(root, request.run) if request.run else root / "code"
    base = Path.home() if request.home else base
    for part in request.parts:
        resolve_inside(base, part.path)
    return base


def _hash(path: Path, size: int, record: HashRecord | None) -> HashRecord | None:
    """Return the record, with its hash, of a file that still matches it; None for any other."""
    if record is None or record.size != size or not _is_same(path, record):
        return None
    if record.sha256:
        return record
    try:
        hashed = record._replace(sha256=hash_file(path))
    except OSError:
        return None
    return hashed if _is_same(path, record) else None


def _stat(path: Path) -> HashRecord | None:
    """Return a record of the file as it is now, without a hash."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return HashRecord(size=status.st_size, mtime_ns=status.st_mtime_ns, sha256="")


def _is_same(path: Path, record: HashRecord) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    identity = (status.st_size, status.st_mtime_ns)
    return stat.S_ISREG(status.st_mode) and identity == (record.size, record.mtime_ns)

"""The random id of a lab, by which its servers are found, and atomic file writes."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import msgspec

from labctl.config.document import escape, make_read_error
from labctl.decoding import decode_json
from labctl.errors import LabError, PolicyError

LAB_ID_FILE = Path(".labctl") / "lab.json"


class _LabRecord(msgspec.Struct):
    id: str
    created_at: float = 0.0


def read_lab_id(root: Path) -> str:
    """Return the lab's id, or "" if it has none yet. Creates nothing.

    Raises PolicyError if .labctl is a link, LabError if the file is damaged.
    """
    file = root / LAB_ID_FILE
    if file.parent.is_symlink() or file.is_symlink():
        raise PolicyError(
            f"{escape(str(file.parent))} is a link to another place",
            why="labctl writes there, and a lab of somebody else must not choose where",
            hint=f"rm {escape(str(file.parent))}",
        )
    try:
        record = decode_json(file.read_bytes(), _LabRecord)
    except FileNotFoundError:
        return ""
    except msgspec.MsgspecError:
        record = _LabRecord(id="")
    except OSError as error:
        raise make_read_error(file, error) from error
    if not re.fullmatch("[0-9a-f]{12}", record.id):
        raise LabError(
            f"{escape(str(file))} is damaged",
            why="it holds the id by which this lab's servers are found",
            hint="labctl status --refresh   # shows what the lab still has; then delete that file",
        )
    return record.id


def ensure_lab_id(root: Path) -> str:
    """Return the lab's id, 12 hex digits; create it if missing, once even for many processes."""
    existing_id = read_lab_id(root)
    if existing_id:
        return existing_id
    file = root / LAB_ID_FILE
    record = {"id": os.urandom(6).hex(), "created_at": round(time.time(), 3)}
    try:
        file.parent.mkdir(exist_ok=True)
        # Without this a copied or committed lab would share its id, and with it its servers.
        ignore = file.parent / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
        _create_atomically(file, json.dumps(record).encode() + b"\n")
    except OSError as error:
        raise LabError(
            f"cannot write {escape(str(file))}",
            why=error.strerror or "",
            hint="make the lab's directory writable for your account",
        ) from error
    return read_lab_id(root)


def _create_atomically(file: Path, data: bytes) -> None:
    """Create `file` with all of `data` at once; do not change an existing file."""
    draft = write_draft(file, data, mode=0o644)
    try:
        os.link(draft, file)
    except FileExistsError:
        return
    except OSError:
        # No hard links on this file system (FAT, some shares): the last one to rename wins.
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def write_draft(file: Path, data: bytes, *, mode: int) -> Path:
    """Write `data` to a new file next to `file`, to be renamed to it, and sync it to disk."""
    draft = file.with_name(f".{file.name}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def write_private(file: Path, data: bytes) -> None:
    """Replace `file` atomically by a 0600 one; missing directories are created with 0700."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(file, data)


def replace_file(file: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file completely or not at all, with this mode whatever the umask is."""
    draft = write_draft(file, data, mode=mode)
    try:
        draft.chmod(mode)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)

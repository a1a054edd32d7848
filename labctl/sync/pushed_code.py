"""The hashes of the code that was last pushed to a server: what a run's code is compared by."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value

# Enough to tell the versions of a file apart.
HASH_DIGITS = 16


class PushedCode(Value, frozen=True):
    """The code that a server has: the start of each file's sha256, by path."""

    server_id: str
    files: dict[str, str]


def save_pushed_code(root: Path, lab_id: str, server_id: str, files: Mapping[str, str]) -> None:
    """Save what a push has left on a server. Without this record only comparisons lack it."""
    short = {path: sha256[:HASH_DIGITS] for path, sha256 in files.items()}
    path = _find_file(root, lab_id)
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        staging.write_bytes(msgspec.json.encode(PushedCode(server_id=server_id, files=short)))
        staging.replace(path)


def read_pushed_code(root: Path, lab_id: str, server_id: str) -> dict[str, str]:
    """Return the hashes of the code that the server has; empty if no push recorded them."""
    try:
        pushed = decode_json(_find_file(root, lab_id).read_bytes(), PushedCode)
    except (OSError, ValueError, msgspec.MsgspecError):
        return {}
    return pushed.files if pushed.server_id == server_id else {}


def _find_file(root: Path, lab_id: str) -> Path:
    return root / ".labctl" / f"pushed-{lab_id}.json"

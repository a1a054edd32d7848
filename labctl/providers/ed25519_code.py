"""An ed25519 host key as 43 letters, for clouds whose servers have little but a name."""

from __future__ import annotations

import base64
import re

LETTERS = r"[A-Za-z0-9_-]{43}"
# SSH's encoding of an ed25519 public key is this and 32 bytes.
_PREFIX = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"


def encode_host_key(host_key: str) -> str:
    """Return the letters that stand for a public key line of an ed25519 key."""
    raw = base64.b64decode(host_key.split()[1])
    assert raw.startswith(_PREFIX), "labctl makes ed25519 host keys only"
    return base64.urlsafe_b64encode(raw[len(_PREFIX) :]).decode().rstrip("=")


def decode_host_key(letters: str) -> str:
    """Return the public key line that the letters stand for; "" for anything else."""
    if not re.fullmatch(LETTERS, letters):
        return ""
    raw = _PREFIX + base64.urlsafe_b64decode(letters + "=")
    return f"ssh-ed25519 {base64.b64encode(raw).decode()}"

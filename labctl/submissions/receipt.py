"""The receipt: what a receiver accepted and when, signed with its Ed25519 key.

The signature covers the values as shown, in one fixed form, so that any edit of the file is
detected, including added keys.
"""

from __future__ import annotations

import base64
import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.submissions.untrusted_json import UPGRADE, decode_untrusted_json, is_newer_version

with lazy_imports(__name__):
    from cryptography import exceptions as crypto_errors
    from cryptography.hazmat.primitives.asymmetric import ed25519

KIND = "labctl-receipt"
VERSION = 1
_DOMAIN = b"labctl receipt 1\n"
MOST_BYTES = 64 * 1024


class Receipt(Value, frozen=True, forbid_unknown_fields=True):
    """A receipt. `received` is when the bundle was complete, in UTC by the receiver's clock.

    `number` counts the student's submissions of this assignment from 1. `late_s` and `penalty`
    follow the rules at that time, extensions included. `bundle_sha256` is of the whole file.
    """

    kind: str
    version: int
    course: str
    assignment: str
    student: str
    number: int
    received: str
    due: str
    late_s: int
    penalty: int
    run: str
    bundle_bytes: int
    bundle_sha256: str
    manifest_sha256: str

    @property
    def received_at(self) -> float:
        return datetime.fromisoformat(self.received).timestamp()


class Signed(Value, frozen=True, forbid_unknown_fields=True):
    """A signed receipt, as stored: the receipt, the public key and the signature."""

    receipt: Receipt
    key: str
    signature: str


def utc_text(at: float) -> str:
    """Return a Unix time as UTC text, as in 2026-11-28T23:59:00Z."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_signing_key(path: Path) -> str:
    """Create a private key at `path` (0600) and its public key at `path`.pub, if missing.

    Returns the public key.
    """
    if not path.exists():
        text = (
            "ed25519-private:"
            + base64.b64encode(ed25519.Ed25519PrivateKey.generate().private_bytes_raw()).decode()
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(text + "\n")
    public = read_public_key(path)
    path.with_name(path.name + ".pub").write_text(public + "\n")
    return public


def read_public_key(path: Path) -> str:
    """Return the public key of the private key at `path`, as `ed25519:...`."""
    raw = (
        ed25519.Ed25519PrivateKey.from_private_bytes(_read_private_key(path))
        .public_key()
        .public_bytes_raw()
    )
    return "ed25519:" + base64.b64encode(raw).decode()


def sign(receipt: Receipt, key: Path) -> Signed:
    """Sign a receipt with the private key at `key`."""
    signature = sign_bytes(_signed_bytes(receipt), key)
    return Signed(receipt=receipt, key=read_public_key(key), signature=signature)


def sign_bytes(data: bytes, key: Path) -> str:
    """Return the signature of `data` by the private key at `key`, in base64."""
    signature = ed25519.Ed25519PrivateKey.from_private_bytes(_read_private_key(key)).sign(data)
    return base64.b64encode(signature).decode()


def is_signed(data: bytes, signature: str, public: str) -> bool:
    """Tell whether `public` (`ed25519:...`) signed exactly these bytes."""
    try:
        raw = base64.b64decode(public.removeprefix("ed25519:"), validate=True)
        signature_bytes = base64.b64decode(signature, validate=True)
        ed25519.Ed25519PublicKey.from_public_bytes(raw).verify(signature_bytes, data)
    except (crypto_errors.InvalidSignature, ValueError):
        return False
    return True


def encode(signed: Signed) -> bytes:
    """Return a signed receipt as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n"


def decode(data: bytes) -> Signed:
    """Parse a signed receipt; PolicyError if it is not valid."""
    try:
        if len(data) > MOST_BYTES:
            raise ValueError("it is too large")
        if is_newer_version(data, "receipt", KIND, VERSION):
            raise PolicyError(
                "this receipt cannot be verified here",
                why="it was signed by a newer labctl",
                hint=UPGRADE,
            )
        signed = decode_untrusted_json(data, Signed)
    except ValueError as error:
        raise _make_invalid_error(f"it cannot be read: {error}") from None
    if signed.receipt.kind != KIND or signed.receipt.version != VERSION:
        raise _make_invalid_error("it is of another kind or version")
    return signed


def verify(signed: Signed, public: str) -> Receipt:
    """Return the receipt if `public` (the assignment's `receiver`) signed it unchanged.

    PolicyError if not.
    """
    if signed.key != public:
        raise _make_invalid_error("it was not signed by the key of the assignment's receiver")
    if not is_signed(_signed_bytes(signed.receipt), signed.signature, public):
        raise _make_invalid_error("it was changed after it was signed")
    return signed.receipt


def _signed_bytes(receipt: Receipt) -> bytes:
    return _DOMAIN + msgspec.json.encode(receipt, order="deterministic")


def _read_private_key(path: Path) -> bytes:
    try:
        text = path.read_text().strip()
        return base64.b64decode(text.removeprefix("ed25519-private:"), validate=True)
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no signing key at {path}", hint="labctl receive init DIR"
        ) from None
    except (OSError, ValueError) as error:
        raise LabError(
            f"{path} cannot be used as a signing key",
            why=str(error),
            hint="restore it from a backup, or make another key:\nlabctl receive init NEW-DIR",
        ) from None


def _make_invalid_error(why: str) -> PolicyError:
    return PolicyError(
        "this receipt is not valid",
        why=why,
        hint="labctl submit   # submit again: the same bundle gets the same receipt",
    )

"""The manifest of a bundle: every file with its hash, the run's record, the code's commit."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from labctl.errors import TransferError
from labctl.model import Value
from labctl.submissions.untrusted_json import decode_untrusted_json
from labctl.wire.containment import is_contained

NAME = "manifest.json"
KIND = "labctl-submission"
MOST_BYTES = 8 * 1024 * 1024
MOST_FILES = 20_000
# The directories of a bundle.
TOPS = ("model", "logs", "code")
# The files next to them.
SINGLE = ("report.html", "evaluation.json", "run.json")
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\\\\\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class BundleFile(Value, frozen=True, forbid_unknown_fields=True):
    """A file of the bundle: its path in it, its size in bytes, its SHA-256 in hex."""

    path: str
    size: int
    sha256: str


class CodeCommit(Value, frozen=True, forbid_unknown_fields=True):
    """The git commit of the code ("" if unknown), and whether files differed from it.

    `run_commit` and `run_dirty` are those at the start of the run.
    """

    commit: str = ""
    dirty: bool | None = None
    run_commit: str = ""
    run_dirty: bool | None = None


class BundleManifest(Value, frozen=True, forbid_unknown_fields=True):
    """The contents of a bundle.

    `record` is the run as its server reported it; `checkpoint` is the one whose files are the
    model. It has no time: the same files make the same bundle, and the receiver stamps the time.
    """

    kind: str
    version: int
    assignment: str
    course: str
    student: str
    lab: str
    run: str
    checkpoint: str
    record: dict[str, Any]
    code: CodeCommit
    files: tuple[BundleFile, ...]


def encode(manifest: BundleManifest) -> bytes:
    """Return the manifest as indented JSON, always the same for the same manifest."""
    body = msgspec.json.encode(manifest, order="deterministic")
    return msgspec.json.format(body, indent=1) + b"\n"


def decode(data: bytes) -> BundleManifest:
    """Parse a manifest; TransferError if it is not valid, or names a forbidden file."""
    try:
        manifest = decode_untrusted_json(data, BundleManifest)
    except ValueError as error:
        raise make_refusal_error(f"its {NAME} cannot be read: {error}") from None
    if manifest.kind != KIND or manifest.version != 1:
        raise make_refusal_error(f"its {NAME} is of another kind or version")
    if len(manifest.files) > MOST_FILES:
        raise make_refusal_error(
            f"it has {len(manifest.files)} files; at most {MOST_FILES} are accepted"
        )
    seen: set[str] = set()
    for file in manifest.files:
        check_path(file.path)
        folded = file.path.casefold()
        if folded in seen:
            raise make_refusal_error(f"{file.path!a} is named twice")
        seen.add(folded)
        if file.size < 0 or not re.fullmatch("[0-9a-f]{64}", file.sha256):
            raise make_refusal_error(f"{file.path!a} has no size and SHA-256")
    return manifest


def check_path(path: str) -> str:
    """Return `path`; TransferError if it is not a permitted place in a bundle."""
    parts = path.split("/")
    is_placed = path in SINGLE or (parts[0] in TOPS and len(parts) > 1)
    if not is_contained(path):
        raise make_refusal_error(f"the name {path!a} leaves the bundle")
    if _ODD.search(path) or not _is_utf8(path) or len(path.encode()) > 1000 or len(parts) > 32:
        raise make_refusal_error(f"the name {path!a} is not allowed for a file")
    if not is_placed:
        raise make_refusal_error(f"{path!a} is outside the directories of a bundle")
    return path


def make_refusal_error(why: str) -> TransferError:
    """Return the error for a bundle that is refused because of `why`."""
    return TransferError("the bundle is refused", why=why, hint="labctl submit")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

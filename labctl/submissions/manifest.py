"""What a bundle says of itself: every file by its hash, the run's record, where the code stood."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from labctl.errors import TransferError
from labctl.model import Value
from labctl.submissions.untrusted_json import decoded

NAME = "manifest.json"
KIND = "labctl-submission"
MOST_BYTES = 8 * 1024 * 1024
MOST_FILES = 20_000
# The folders of a bundle.
TOPS = ("model", "logs", "code")
# The files beside them.
SINGLE = ("report.html", "evaluation.json", "run.json")
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\\\\\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class BundleFile(Value, frozen=True, forbid_unknown_fields=True):
    """A file of the bundle: its path in it, bytes, sha256 in hex."""

    path: str
    size: int
    sha256: str


class Code(Value, frozen=True, forbid_unknown_fields=True):
    """Where the code stood: the git commit ("" where there is none), whether files differed.

    `run_commit` and `run_dirty` are those of the moment when the run started.
    """

    commit: str = ""
    dirty: bool | None = None
    run_commit: str = ""
    run_dirty: bool | None = None


class Manifest(Value, frozen=True, forbid_unknown_fields=True):
    """`record` is the run as the server told it, `checkpoint` the one whose files are the model.

    No time stands here: the same files make the same bundle, and its receiver stamps the time.
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
    code: Code
    files: tuple[BundleFile, ...]


def encode(manifest: Manifest) -> bytes:
    """JSON for people and machines, the same for the same manifest."""
    body = msgspec.json.encode(manifest, order="deterministic")
    return msgspec.json.format(body, indent=1) + b"\n"


def decode(data: bytes) -> Manifest:
    """The manifest in `data`; TransferError where it is none, or names what it must not."""
    try:
        found = decoded(data, Manifest)
    except ValueError as error:
        raise refused(f"its {NAME} cannot be read: {error}") from None
    if found.kind != KIND or found.version != 1:
        raise refused(f"its {NAME} is of another kind or version")
    if len(found.files) > MOST_FILES:
        raise refused(f"it names {len(found.files)} files; at most {MOST_FILES} are taken")
    seen: set[str] = set()
    for one in found.files:
        check_path(one.path)
        folded = one.path.casefold()
        if folded in seen:
            raise refused(f"{one.path!a} is named twice")
        seen.add(folded)
        if one.size < 0 or not re.fullmatch("[0-9a-f]{64}", one.sha256):
            raise refused(f"{one.path!a} has no size and SHA-256")
    return found


def check_path(path: str) -> str:
    """`path`, or TransferError where it could lead anywhere but below its bundle."""
    parts = path.split("/")
    placed = path in SINGLE or (parts[0] in TOPS and len(parts) > 1)
    if any(part in ("", ".", "..") for part in parts) or path.startswith("/"):
        raise refused(f"the name {path!a} leaves the bundle")
    if _ODD.search(path) or not _is_utf8(path) or len(path.encode()) > 1000 or len(parts) > 32:
        raise refused(f"the name {path!a} is not one that a file may have")
    if not placed:
        raise refused(f"{path!a} is at no place that a bundle has")
    return path


def refused(why: str) -> TransferError:
    return TransferError("the bundle is refused", why=why, hint="labctl submit")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

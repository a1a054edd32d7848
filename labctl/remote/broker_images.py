"""Images on a shared server: an account's own are seen by nobody else, and stand for nobody else's.

What an account builds or sends is kept under `labctl-u<uid>/`; a name means the account's own
image first, and then what staff or a registry gave to all.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from typing import Any, Iterator

from .broker_http import CHUNK, Refusal
from .broker_rules import OWNER, Account

PRIVATE = re.compile(r"^labctl-u(\d+)/")
REFERENCE = re.compile(r"^[a-z0-9][a-z0-9._/:-]{0,255}(:[\w.-]{1,128})?$")
IMAGE_ID = re.compile(r"^(sha256:)?[0-9a-f]{12,64}$")
MOST_MANIFEST = 4 * 1024 * 1024


def own_reference(account: Account, reference: str) -> str:
    """Where the account's own image of this name is kept; Refusal for what is no name."""
    bare = reference.split("@", 1)[0]
    if not REFERENCE.match(bare) or PRIVATE.match(bare):
        raise Refusal(404, f"No such image: {reference[:200]}")
    head, slash, last = bare.rpartition("/")
    name, _, tag = last.partition(":")
    place = f"{head}{slash}{name}".replace(":", "-")
    return f"labctl-u{account.uid}/{place}:{tag or 'latest'}"


def candidates(account: Account, reference: str) -> list[str]:
    """What the engine is asked for, one after the other."""
    if IMAGE_ID.match(reference):
        return [reference]
    own = own_reference(account, reference)
    return [reference] if "@" in reference else [own, reference]


def visible(account: Account, found: dict[str, Any]) -> bool:
    """Whether an image, as `inspect` shows it, is the account's or everybody's."""
    tags = found.get("RepoTags") or []
    owners = {match.group(1) for match in map(PRIVATE.match, tags) if match}
    if str(account.uid) in owners:
        return True
    public = [tag for tag in tags if not PRIVATE.match(tag)]
    if public or (found.get("RepoDigests") and not owners):
        return True
    labels = (found.get("Config") or {}).get("Labels") or {}
    return not owners and labels.get(OWNER) == str(account.uid)


def retagged(account: Account, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """A `docker save` as it passes, every name in it made the account's own.

    An archive without a manifest.json, or with other lists of names, is not taken.
    """
    sink = _Sink()
    try:
        with tarfile.open(fileobj=_Reader(blocks), mode="r|*", bufsize=CHUNK) as source:
            yield from _passed(account, source, sink)
    except tarfile.TarError:
        raise Refusal(400, "that is no archive of `docker save`") from None


def _passed(account: Account, source: tarfile.TarFile, sink: _Sink) -> Iterator[bytes]:
    target: Any = tarfile.open(fileobj=sink, mode="w|", bufsize=CHUNK)  # noqa: SIM115 (a broken one is not ended)
    seen = False
    for member in source:
        if member.name in ("repositories", "index.json", "oci-layout"):
            continue
        content = source.extractfile(member) if member.isfile() else None
        if member.name == "manifest.json" and content:
            text = _manifest(account, content.read(MOST_MANIFEST))
            member.size, content, seen = len(text), io.BytesIO(text), True
        target.addfile(member, None)
        yield from sink.taken()
        if content:
            yield from _file(target, sink, member, content)
    target.close()
    if not seen:
        raise Refusal(400, "the shared server takes images of `docker save` only")
    yield from sink.taken()


def _file(target: Any, sink: _Sink, member: Any, content: Any) -> Iterator[bytes]:
    while True:
        block = content.read(CHUNK)
        if not block:
            break
        target.fileobj.write(block)
        target.offset += len(block)
        yield from sink.taken()
    rest = -member.size % tarfile.BLOCKSIZE
    target.fileobj.write(b"\0" * rest)
    target.offset += rest


def _manifest(account: Account, text: bytes) -> bytes:
    try:
        listed = json.loads(text)
        for one in listed:
            one["RepoTags"] = [own_reference(account, tag) for tag in one.get("RepoTags") or []]
            if not one["RepoTags"]:
                raise Refusal(400, "the shared server takes images with a name only")
    except (ValueError, TypeError, AttributeError):
        raise Refusal(400, "the archive's manifest.json cannot be read") from None
    return json.dumps(listed).encode()


class _Reader(io.RawIOBase):
    """Blocks as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._left = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._left) < size:
            block = next(self._blocks, b"")
            if not block:
                break
            self._left += block
        size = len(self._left) if size < 0 else size
        found, self._left = self._left[:size], self._left[size:]
        return found


class _Sink(io.RawIOBase):
    """What tarfile writes, to be taken away again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        self._parts.append(bytes(block))
        return len(block)

    def taken(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        return parts

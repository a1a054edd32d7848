"""Taking in what students posted into a bucket: read, checked, stamped with S3's clock, signed.

Can be run again at any time, and goes on where it was: `collected/NAME.json` in the receiver's
directory says which posts were answered.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from labctl.errors import LabError, PolicyError, TransferError, UsageError
from labctl.model import Value
from labctl.submissions import receipt
from labctl.submissions.buckets import MOST_INDEX_BYTES, MOST_PARTS, Bucket, Version, part_key
from labctl.submissions.manifest import refused
from labctl.submissions.receipt import Signed
from labctl.submissions.receiver import Receiver, checked
from labctl.submissions.untrusted_json import decoded

MOST_REFUSALS = 20


class Part(Value, frozen=True, forbid_unknown_fields=True):
    sha256: str
    size: int


class Index(Value, frozen=True, forbid_unknown_fields=True):
    """What a student posts last: the bundle, and the parts that it was cut into, in order."""

    version: int
    sha256: str
    size: int
    parts: tuple[Part, ...]


class Refusal(Value, frozen=True):
    """A post that was not taken in. `sha256` is "" where not even that could be read."""

    sha256: str
    at: str
    why: str


class Answers(Value, frozen=True):
    """What a student fetches: everything signed, everything refused."""

    version: int = 1
    receipts: tuple[Signed, ...] = ()
    refused: tuple[Refusal, ...] = ()


class Collected(Value, frozen=True):
    """One post that was looked at: a receipt, or why there is none."""

    student: str
    signed: Signed | None
    why: str = ""


class _Done(Value, frozen=True):
    """The receiver's own memory of an assignment's posts."""

    answered: tuple[str, ...] = ()
    refused: dict[str, tuple[Refusal, ...]] = msgspec.field(default_factory=dict)


def collect(receiver: Receiver, bucket: Bucket, name: str) -> list[Collected]:
    """Take in every post that was not looked at before, oldest first, and answer it.

    What is wrong with one post is its answer, and does not stop the next one.
    """
    receiver.rules(name)
    file = receiver.directory / "collected" / f"{name}.json"
    done = _read(file)
    posts: dict[str, list[Version]] = {}
    for version in bucket.versions(name, ""):
        student, _, key = version.key.removeprefix(bucket.key(name) + "/").partition("/")
        posts.setdefault(f"{student}/{key}", []).append(version)
    found = []
    for place, versions in sorted(posts.items()):
        student, _, key = place.partition("/")
        for version in versions if key == "index.json" else []:
            if version.id in done.answered:
                continue
            one, refusal = _one(receiver, bucket, name, student, version, posts)
            known = done.refused.get(student, ())
            refusals = {
                **done.refused,
                student: (*known, *filter(None, [refusal]))[-MOST_REFUSALS:],
            }
            done = _Done(answered=(*done.answered, version.id), refused=refusals)
            _answer(receiver, bucket, name, student, refusals[student])
            _write(file, done)
            found.append(one)
    return found


def _one(
    receiver: Receiver,
    bucket: Bucket,
    name: str,
    student: str,
    version: Version,
    posts: dict[str, list[Version]],
) -> tuple[Collected, Refusal | None]:
    sha256 = ""
    try:
        checked(student)
        index = _index(bucket, version)
        sha256 = index.sha256
        signed = _taken(receiver, bucket, name, student, version, index, posts)
        return Collected(student=student, signed=signed), None
    except (PolicyError, TransferError, UsageError) as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        at = receipt.utc_text(version.at)
        return Collected(student=student, signed=None, why=why), Refusal(
            sha256=sha256, at=at, why=why
        )


def _index(bucket: Bucket, version: Version) -> Index:
    if version.size > MOST_INDEX_BYTES:
        raise refused("its index is too large")
    try:
        found = decoded(b"".join(bucket.blocks(version)), Index)
    except ValueError as error:
        raise refused(f"its index cannot be read: {error}") from None
    whole = sum(part.size for part in found.parts) == found.size
    if not whole or not 0 < len(found.parts) <= MOST_PARTS or any(p.size < 1 for p in found.parts):
        raise refused("its index does not add up")
    return found


def _taken(
    receiver: Receiver,
    bucket: Bucket,
    name: str,
    student: str,
    version: Version,
    index: Index,
    posts: dict[str, list[Version]],
) -> Signed:
    about = (name, student, index.sha256, index.size)
    # S3's clock says when the last of it came; all of it was posted before its index, or is now.
    begun = receiver.begin(*about, at=version.at)
    if isinstance(begun, Signed):
        return begun
    at, offset = version.at, 0
    for number, part in enumerate(index.parts, 1):
        candidates = posts.get(f"{student}/{part_key(number)}", [])
        fitting = [one for one in reversed(candidates) if one.size == part.size]
        used = next(
            (one for one in fitting if _written(receiver, bucket, about, offset, one, part)), None
        )
        if used is None:
            raise refused(f"part {number} of it was not posted as its index says")
        at, offset = max(at, used.at), offset + part.size
    return receiver.finish(*about, at=at)


def _written(
    receiver: Receiver,
    bucket: Bucket,
    about: tuple[str, str, str, int],
    offset: int,
    version: Version,
    part: Part,
) -> bool:
    """Whether a version of a part is the one that the index means; it is staged in passing."""
    digest = hashlib.sha256()
    for block in bucket.blocks(version):
        receiver.write(*about, offset, block)
        digest.update(block)
        offset += len(block)
    return digest.hexdigest() == part.sha256


def _answer(
    receiver: Receiver, bucket: Bucket, name: str, student: str, refusals: tuple[Refusal, ...]
) -> None:
    answers = Answers(receipts=tuple(receiver.receipts(name, student)), refused=refusals)
    key = bucket.key(name, student, "receipts.json")
    bucket.write(key, msgspec.json.encode(answers))


def _read(file: Path) -> _Done:
    try:
        return decoded(file.read_bytes(), _Done)
    except FileNotFoundError:
        return _Done()
    except ValueError as error:
        raise LabError(
            f"{file} is damaged",
            why=str(error),
            hint=f"mv {file} {file}.old   # every post is then looked at once more",
        ) from None


def _write(file: Path, done: _Done) -> None:
    file.parent.mkdir(exist_ok=True, mode=0o700)
    draft = file.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(done))
    draft.replace(file)

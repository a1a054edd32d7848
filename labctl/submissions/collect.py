"""Collecting what students posted into a bucket: read, checked, stamped with S3's clock, signed.

It can be repeated at any time and continues where it was: `collected/NAME.json` in the receiver's
directory records which posts were answered.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from labctl.errors import LabError, PolicyError, TransferError, UsageError
from labctl.model import Value
from labctl.submissions import receipt
from labctl.submissions.buckets import MOST_INDEX_BYTES, MOST_PARTS, Bucket, Version, part_key
from labctl.submissions.manifest import make_refusal_error
from labctl.submissions.receipt import Signed
from labctl.submissions.receiver import Receiver, check_name
from labctl.submissions.untrusted_json import decode_untrusted_json

MOST_REFUSALS = 20


class PostPart(Value, frozen=True, forbid_unknown_fields=True):
    """A part of a posted bundle."""

    sha256: str
    size: int


class PostIndex(Value, frozen=True, forbid_unknown_fields=True):
    """What a student posts last: the bundle, and its parts in order."""

    version: int
    sha256: str
    size: int
    parts: tuple[PostPart, ...]


class PostRefusal(Value, frozen=True):
    """A post that was not accepted. `sha256` is "" if it could not be read."""

    sha256: str
    at: str
    why: str


class PostAnswers(Value, frozen=True):
    """The receiver's answers to a student: all receipts and refusals."""

    version: int = 1
    receipts: tuple[Signed, ...] = ()
    refused: tuple[PostRefusal, ...] = ()


class CollectedPost(Value, frozen=True):
    """A post that was processed: its receipt, or why it was refused."""

    student: str
    signed: Signed | None
    why: str = ""


class _AnsweredPosts(Value, frozen=True):
    """The receiver's record of the posts of an assignment that it has answered."""

    answered: tuple[str, ...] = ()
    refused: dict[str, tuple[PostRefusal, ...]] = msgspec.field(default_factory=dict)


def collect_bucket(receiver: Receiver, bucket: Bucket, name: str) -> list[CollectedPost]:
    """Accept or refuse every new post, oldest first, and publish the answers.

    A bad post is refused and does not stop the next one.
    """
    receiver.load_rules(name)
    file = receiver.directory / "collected" / f"{name}.json"
    done = _read_done(file)
    posts: dict[str, list[Version]] = {}
    for version in bucket.list_versions(name, ""):
        student, _, key = version.key.removeprefix(bucket.key(name) + "/").partition("/")
        posts.setdefault(f"{student}/{key}", []).append(version)
    results = []
    for address, versions in sorted(posts.items()):
        student, _, key = address.partition("/")
        for version in versions if key == "index.json" else []:
            if version.id in done.answered:
                continue
            result, refusal = _process_post(receiver, bucket, name, student, version, posts)
            earlier = done.refused.get(student, ())
            refusals = {
                **done.refused,
                student: (*earlier, *filter(None, [refusal]))[-MOST_REFUSALS:],
            }
            done = _AnsweredPosts(answered=(*done.answered, version.id), refused=refusals)
            _publish_answers(receiver, bucket, name, student, refusals[student])
            _write_done(file, done)
            results.append(result)
    return results


def _process_post(
    receiver: Receiver,
    bucket: Bucket,
    name: str,
    student: str,
    version: Version,
    posts: dict[str, list[Version]],
) -> tuple[CollectedPost, PostRefusal | None]:
    sha256 = ""
    try:
        check_name(student)
        index = _read_index(bucket, version)
        sha256 = index.sha256
        signed = _accept_bundle(receiver, bucket, name, student, version, index, posts)
        return CollectedPost(student=student, signed=signed), None
    except (PolicyError, TransferError, UsageError) as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        at = receipt.utc_text(version.at)
        return CollectedPost(student=student, signed=None, why=why), PostRefusal(
            sha256=sha256, at=at, why=why
        )


def _read_index(bucket: Bucket, version: Version) -> PostIndex:
    if version.size > MOST_INDEX_BYTES:
        raise make_refusal_error("its index is too large")
    try:
        index = decode_untrusted_json(b"".join(bucket.read_blocks(version)), PostIndex)
    except ValueError as error:
        raise make_refusal_error(f"its index cannot be read: {error}") from None
    sizes = [part.size for part in index.parts]
    if sum(sizes) != index.size or not 0 < len(sizes) <= MOST_PARTS or min(sizes) < 1:
        raise make_refusal_error("its index is inconsistent")
    return index


def _accept_bundle(
    receiver: Receiver,
    bucket: Bucket,
    name: str,
    student: str,
    version: Version,
    index: PostIndex,
    posts: dict[str, list[Version]],
) -> Signed:
    about = (name, student, index.sha256, index.size)
    # The submission time is that of its last part by S3's clock. Normally the index comes last.
    started = receiver.begin(*about, at=version.at)
    if isinstance(started, Signed):
        return started
    at, offset = version.at, 0
    for number, part in enumerate(index.parts, 1):
        candidates = posts.get(f"{student}/{part_key(number)}", [])
        fitting = [other for other in reversed(candidates) if other.size == part.size]
        used = next(
            (
                other
                for other in fitting
                if _stage_part(receiver, bucket, about, offset, other, part)
            ),
            None,
        )
        if used is None:
            raise make_refusal_error(f"part {number} does not match its index")
        at, offset = max(at, used.at), offset + part.size
    return receiver.finish(*about, at=at)


def _stage_part(
    receiver: Receiver,
    bucket: Bucket,
    about: tuple[str, str, str, int],
    offset: int,
    version: Version,
    part: PostPart,
) -> bool:
    """Write a version of a part to staging; tell whether it is the one in the index."""
    digest = hashlib.sha256()
    for block in bucket.read_blocks(version):
        receiver.write(*about, offset, block)
        digest.update(block)
        offset += len(block)
    return digest.hexdigest() == part.sha256


def _publish_answers(
    receiver: Receiver, bucket: Bucket, name: str, student: str, refusals: tuple[PostRefusal, ...]
) -> None:
    answers = PostAnswers(receipts=tuple(receiver.receipts(name, student)), refused=refusals)
    key = bucket.key(name, student, "receipts.json")
    bucket.write(key, msgspec.json.encode(answers))


def _read_done(file: Path) -> _AnsweredPosts:
    try:
        return decode_untrusted_json(file.read_bytes(), _AnsweredPosts)
    except FileNotFoundError:
        return _AnsweredPosts()
    except ValueError as error:
        raise LabError(
            f"{file} is damaged",
            why=str(error),
            hint=f"mv {file} {file}.old   # every post is then processed again",
        ) from None


def _write_done(file: Path, done: _AnsweredPosts) -> None:
    file.parent.mkdir(exist_ok=True, mode=0o700)
    draft = file.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(done))
    draft.replace(file)

"""Accepting a complete bundle: examining it, and writing its receipt."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from labctl.errors import TransferError
from labctl.model import Value
from labctl.submissions import bundle, receipt
from labctl.submissions.assignment import Assignment, DeadlineStatus
from labctl.submissions.manifest import make_refusal_error
from labctl.submissions.receipt import Receipt

MOST_NAMED = 20


class Expected(Value, frozen=True):
    """The student and assignment that a bundle must be for."""

    assignment: str
    course: str
    student: str


class Arrived(Value, frozen=True):
    """A complete bundle, as the receiver knows it."""

    student: str
    size: int
    sha256: str


class Examined(Value, frozen=True):
    """The values that are read from an accepted bundle itself."""

    run: str
    manifest_sha256: str


def check_arrived(path: Path, sha256: str) -> None:
    """Raise TransferError if the file is not the one that was announced."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise TransferError("the bundle did not arrive intact", hint="labctl submit")


def examine(file: BinaryIO, expected: Expected) -> Examined:
    """Check that the file is the expected bundle, complete, and safe to load and unpack.

    TransferError if not.
    """
    manifest, members = bundle.inspect(file)
    if (manifest.assignment, manifest.course) != (expected.assignment, expected.course):
        raise make_refusal_error(
            f"it was made for {manifest.assignment!a}, not for {expected.assignment}"
        )
    if manifest.student != expected.student:
        raise make_refusal_error(
            f"it belongs to {manifest.student!a}, but {expected.student} submitted it"
        )
    if hazards := bundle.find_hazards(file, members):
        raise make_refusal_error("\n".join(hazards[:MOST_NAMED]))
    first = next(bundle.read_members(file))
    file.seek(first.offset)
    return Examined(
        run=manifest.run, manifest_sha256=hashlib.sha256(file.read(first.size)).hexdigest()
    )


def stamp(
    rules: Assignment,
    standing: DeadlineStatus,
    number: int,
    at: float,
    examined: Examined,
    arrived: Arrived,
) -> Receipt:
    """Return the receipt to sign. `standing` is the judgment at Unix time `at`."""
    return Receipt(
        kind=receipt.KIND,
        version=1,
        course=rules.course,
        assignment=rules.name,
        student=arrived.student,
        number=number,
        received=receipt.utc_text(at),
        due="" if standing.due_at is None else receipt.utc_text(standing.due_at),
        late_s=standing.late_s,
        penalty=standing.penalty,
        run=examined.run,
        bundle_bytes=arrived.size,
        bundle_sha256=arrived.sha256,
        manifest_sha256=examined.manifest_sha256,
    )

"""What a receiver does with a bundle that is all there: look into it, and word its receipt."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from labctl.errors import TransferError
from labctl.model import Value
from labctl.submissions import bundle, receipt
from labctl.submissions.assignment import Assignment, Standing
from labctl.submissions.manifest import refused
from labctl.submissions.receipt import Receipt

MOST_NAMED = 20


class Expected(Value, frozen=True):
    """Whose bundle it must be, and for what."""

    assignment: str
    course: str
    student: str


class Arrived(Value, frozen=True):
    """A bundle that is all there, as the receiver knows it."""

    student: str
    size: int
    sha256: str


class Examined(Value, frozen=True):
    """What only the bundle itself can say of a bundle that may be taken in."""

    run: str
    manifest_sha256: str


def check_arrived(path: Path, sha256: str) -> None:
    """TransferError where the file is not the one that was announced."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise TransferError("the bundle did not arrive as promised", hint="labctl submit")


def examine(file: BinaryIO, expected: Expected) -> Examined:
    """TransferError where the file is not the bundle that is expected, whole, with nothing in it
    that harms who loads or unpacks it."""
    found, members = bundle.inspect(file)
    if (found.assignment, found.course) != (expected.assignment, expected.course):
        raise refused(f"it was made for {found.assignment!a}, not for {expected.assignment}")
    if found.student != expected.student:
        raise refused(f"it is {found.student!a}'s, and was handed in by {expected.student}")
    if wrong := bundle.find_hazards(file, members):
        raise refused("\n".join(wrong[:MOST_NAMED]))
    first = next(bundle.members(file))
    file.seek(first.offset)
    return Examined(
        run=found.run, manifest_sha256=hashlib.sha256(file.read(first.size)).hexdigest()
    )


def stamp(
    rules: Assignment,
    standing: Standing,
    number: int,
    at: float,
    examined: Examined,
    arrived: Arrived,
) -> Receipt:
    """What the receiver signs. `standing` is that of the moment `at`."""
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

"""What a receiver does with a bundle that is all there: look into it, and word its receipt."""

from __future__ import annotations

import hashlib
from pathlib import Path

from labctl.errors import TransferError
from labctl.model import Value
from labctl.submissions import bundle, receipt
from labctl.submissions.assignment import Assignment, Standing
from labctl.submissions.manifest import Manifest, refused
from labctl.submissions.receipt import Receipt

MOST_NAMED = 20


class Examined(Value, frozen=True):
    """A bundle that may be taken in, and its two hashes."""

    manifest: Manifest
    size: int
    sha256: str
    manifest_sha256: str


def examine(path: Path, rules: Assignment, student: str, sha256: str) -> Examined:
    """TransferError where the file is not the student's bundle for this assignment, whole, with
    nothing in it that harms who loads or unpacks it."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise TransferError("the bundle did not arrive as promised", hint="labctl submit")
        found, members = bundle.inspect(file)
        if (found.assignment, found.course) != (rules.name, rules.course):
            raise refused(f"it was made for {found.assignment!a}, not for {rules.name}")
        if found.student != student:
            raise refused(f"it is {found.student!a}'s, and was handed in by {student}")
        if wrong := bundle.find_hazards(file, members):
            raise refused("\n".join(wrong[:MOST_NAMED]))
        first = next(bundle.members(file))
        file.seek(first.offset)
        manifest_sha256 = hashlib.sha256(file.read(first.size)).hexdigest()
    return Examined(
        manifest=found,
        size=path.stat().st_size,
        sha256=sha256,
        manifest_sha256=manifest_sha256,
    )


def stamp(
    rules: Assignment, standing: Standing, number: int, at: float, examined: Examined
) -> Receipt:
    """What the receiver signs. `standing` is that of the moment `at`."""
    return Receipt(
        kind=receipt.KIND,
        version=1,
        course=rules.course,
        assignment=rules.name,
        student=examined.manifest.student,
        number=number,
        received=receipt.utc_text(at),
        due="" if standing.due_at is None else receipt.utc_text(standing.due_at),
        late_s=standing.late_s,
        penalty=standing.penalty,
        run=examined.manifest.run,
        bundle_bytes=examined.size,
        bundle_sha256=examined.sha256,
        manifest_sha256=examined.manifest_sha256,
    )

"""The files of a seat's submission that people read, straight from its bundle.

A student chose their names and contents: a name is only ever compared with those in the bundle, and
never becomes a path on this machine.
"""

from __future__ import annotations

from pathlib import Path

from labctl.courses.lateness import DeadlineJudge, find_counting_receipt
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.marks import MarkedSubmission
from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.model import Value
from labctl.submissions.bundle import BundleMember, open_member, read_members
from labctl.submissions.receipt import Receipt
from labctl.submissions.receiver import Receiver

# The parts of a submission that people read; models are left out.
READABLE = ("code/", "report.html", "logs/", "evaluation.json")


def split_lines(content: bytes) -> list[str]:
    """Return the lines of a text, as editors number them."""
    lines = content.decode(errors="replace").replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


class ReadableSubmission(Value, frozen=True):
    """The submission of a seat that counts, and its readable files in the bundle's order."""

    receipt: Receipt
    bundle: Path
    members: tuple[BundleMember, ...]

    def find_member(self, path: str) -> BundleMember:
        """Return a file by its path in the bundle; NotFoundError for any other text."""
        for member in self.members:
            if member.path == path:
                return member
        raise NotFoundError(
            f"submission {self.receipt.number} has no file {path[:100]!a}",
            why=f"it has {len(self.members)} files that can be shown",
        )

    def read_file(self, path: str, most_bytes: int) -> bytes:
        """Return at most the first `most_bytes` bytes of a file."""
        member = self.find_member(path)
        try:
            with self.bundle.open("rb") as file, open_member(file, member) as content:
                return content.read(most_bytes)
        except OSError as error:
            raise LabError("the submission cannot be read", why=error.strerror or "") from error


def open_submission(folder: CourseFolder, assignment: str, seat: Seat) -> ReadableSubmission | None:
    """Return the submission of a seat that counts; None without one. LabError if it is damaged."""
    receipt = _find_receipt(folder, assignment, seat)
    if receipt is None:
        return None
    bundle = Receiver(folder.drop).find_bundle(assignment, receipt.student, receipt.number)
    try:
        with bundle.open("rb") as file:
            members = tuple(one for one in read_members(file) if one.path.startswith(READABLE))
    except OSError as error:
        raise LabError("the submission cannot be read", why=error.strerror or "") from error
    return ReadableSubmission(receipt=receipt, bundle=bundle, members=members)


def find_bundle_sha256(folder: CourseFolder, assignment: str, seat: Seat) -> str:
    """Return the SHA-256 of the bundle of a seat that counts; "" without a submission."""
    receipt = _find_receipt(folder, assignment, seat)
    return receipt.bundle_sha256 if receipt else ""


def find_submission(folder: CourseFolder, assignment: str, seat: Seat) -> MarkedSubmission:
    """Return the number and arrival of the submission of a seat that counts; 0 without one."""
    receipt = _find_receipt(folder, assignment, seat)
    if receipt is None:
        return MarkedSubmission()
    return MarkedSubmission(number=receipt.number, received=receipt.received)


def _find_receipt(folder: CourseFolder, assignment: str, seat: Seat) -> Receipt | None:
    deadline = DeadlineJudge(folder, assignment)
    return find_counting_receipt(Receiver(folder.drop), deadline, assignment, seat)


def require_submission(
    folder: CourseFolder, assignment: str, seat: Seat, bundle_sha256: str | None
) -> None:
    """PolicyError if another submission counts than the one that somebody read.

    None allows any; "" means that there was no submission.
    """
    if bundle_sha256 is None:
        return
    receipt = _find_receipt(folder, assignment, seat)
    if receipt is None and bundle_sha256:
        raise PolicyError("the submission that you have read does not count any more")
    if receipt is not None and receipt.bundle_sha256 != bundle_sha256:
        raise PolicyError(
            f"submission {receipt.number} has arrived meanwhile",
            why="you have read an earlier one" if bundle_sha256 else "",
            hint=f"labctl course collect {assignment}",
        )

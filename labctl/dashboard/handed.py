"""What students handed in, given back to staff: a download, or a report in a sandbox."""

from __future__ import annotations

from pathlib import Path

from labctl.dashboard.view import Person
from labctl.errors import LabError, NotFoundError
from labctl.submissions.bundle import members, opened
from labctl.submissions.receiver import Receiver

REPORT = "report.html"
MOST_REPORT_BYTES = 16 * 1024**2
SANDBOX = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
)
"""A stranger's page: no script, nothing from anywhere, an origin of its own."""


def bundle_of(drop: Path, person: Person, assignment: str, number: int) -> Path:
    """Where a submission of a student, or of their team, lies; NotFoundError where none does."""
    receiver = Receiver(drop)
    handed = set(receiver.students(assignment))
    for name in (person.id, person.team):
        if name and name in handed:
            return receiver.bundle_of(assignment, name, number)
    raise NotFoundError(f"there is no submission of {assignment}")


def report_of(bundle: Path) -> bytes:
    """The report that was handed in, as it is; NotFoundError where there is none to be shown."""
    try:
        with bundle.open("rb") as file:
            for member in members(file):
                if member.path == REPORT:
                    if member.size > MOST_REPORT_BYTES:
                        raise NotFoundError("the report is too large to be shown here")
                    with opened(file, member) as content:
                        return content.read()
    except OSError as error:
        raise LabError("the submission cannot be read", why=error.strerror or "") from error
    raise NotFoundError("this submission holds no report")

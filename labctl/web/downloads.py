"""Students' submissions for staff: the bundle as a download, the report in a sandbox."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import LabError, NotFoundError
from labctl.submissions.bundle import members, opened
from labctl.submissions.receiver import Receiver
from labctl.web.view import HandIn

REPORT = "report.html"
MAX_REPORT_BYTES = 16 * 1024**2
# policy for a page that is not trusted: no scripts, no requests, its own origin
SANDBOX = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
)


def bundle_of(drop: Path, one: HandIn) -> Path:
    """Return the path of a submission; NotFoundError if it was deleted."""
    return Receiver(drop).bundle_of(one.assignment, one.by, one.number)


def report_of(bundle: Path) -> bytes:
    """Return the report in a bundle unchanged; NotFoundError if it has none or it is too large."""
    try:
        with bundle.open("rb") as file:
            for member in members(file):
                if member.path == REPORT:
                    if member.size > MAX_REPORT_BYTES:
                        raise NotFoundError("the report is too large; download the bundle")
                    with opened(file, member) as content:
                        return content.read()
    except OSError as error:
        raise LabError("the submission cannot be read", why=error.strerror or "") from error
    raise NotFoundError("this submission contains no report")

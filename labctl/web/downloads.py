"""What students handed in, given back to staff: a download, or a report in a sandbox."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import LabError, NotFoundError
from labctl.submissions.bundle import members, opened
from labctl.submissions.receiver import Receiver
from labctl.web.view import HandIn

REPORT = "report.html"
MOST_REPORT_BYTES = 16 * 1024**2
# A stranger's page: no script, nothing from anywhere, an origin of its own.
SANDBOX = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
)


def bundle_of(drop: Path, one: HandIn) -> Path:
    """Where a submission lies; NotFoundError where it does not lie there any more."""
    return Receiver(drop).bundle_of(one.assignment, one.by, one.number)


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

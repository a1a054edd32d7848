"""Students' submissions for staff: the bundle as a download, the report in a sandbox."""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.responses import Response

from labctl.errors import LabError, NotFoundError
from labctl.submissions.bundle import open_member, read_members
from labctl.submissions.receiver import Receiver
from labctl.web.view import SubmissionView

REPORT = "report.html"
MAX_REPORT_BYTES = 16 * 1024**2
# policy for a page that is not trusted: no scripts, no requests, its own origin
SANDBOX = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
)


def find_bundle(drop: Path, one: SubmissionView) -> Path:
    """Return the path of a submission; NotFoundError if it was deleted."""
    try:
        return Receiver(drop).find_bundle(one.assignment, one.by, one.number)
    except NotFoundError:
        # The receiver's error names the student, whose name may be hidden here.
        raise NotFoundError("the files of this submission were deleted") from None


def has_report(bundle: Path) -> bool:
    """Tell whether a bundle contains a report that can be shown. LabError if it is damaged."""
    try:
        with bundle.open("rb") as file:
            return any(
                member.path == REPORT and member.size <= MAX_REPORT_BYTES
                for member in read_members(file)
            )
    except OSError:
        return False


def read_report(bundle: Path) -> bytes:
    """Return the report in a bundle unchanged; NotFoundError if it has none or it is too large."""
    try:
        with bundle.open("rb") as file:
            for member in read_members(file):
                if member.path == REPORT:
                    if member.size > MAX_REPORT_BYTES:
                        raise NotFoundError("the report is too large; download the bundle")
                    with open_member(file, member) as content:
                        return content.read()
    except OSError as error:
        raise LabError("the submission cannot be read", why=error.strerror or "") from error
    raise NotFoundError("this submission contains no report")


def sandboxed_response(page: bytes) -> Response:
    """Return a page that somebody else wrote: without scripts, at an origin of its own."""
    headers = {"content-security-policy": SANDBOX}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def read_receipt(receiver: Receiver, submission: SubmissionView) -> bytes:
    """Return the signed receipt of a submission as JSON; NotFoundError without one."""
    for signed in receiver.receipts(submission.assignment, submission.by):
        if signed.receipt.number == submission.number:
            return msgspec.json.format(msgspec.json.encode(signed))
    raise NotFoundError("this receipt does not exist")


def download_response(content: bytes, filename: str) -> Response:
    """Return JSON that a browser stores as a file; `filename` has no text of a request."""
    headers = {"content-disposition": f'attachment; filename="{filename}"'}
    return Response(content, media_type="application/json", headers=headers)

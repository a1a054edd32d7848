"""Submitting through a bucket: the parts are posted with the student's ticket, then their index.

The parts that S3 has accepted are recorded next to the bundle, so that a broken upload continues
after the last of them.
"""

from __future__ import annotations

import hashlib
import io
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from labctl.errors import (
    BusyError,
    ConnectError,
    DeniedError,
    LabError,
    LinkLostError,
    NotFoundError,
    PolicyError,
)
from labctl.http_client import open_session, read_body
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.retry import retry_on
from labctl.submissions.assignment import Ticket
from labctl.submissions.collect import PostAnswers, PostIndex, PostPart
from labctl.submissions.untrusted_json import decode_untrusted_json

if TYPE_CHECKING:
    from requests_toolbelt import MultipartEncoderMonitor

with lazy_imports(__name__):
    import requests_toolbelt

TIMEOUT_S = 60.0
TRIES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 4.0
CHUNK_BYTES = 256 * 1024
MOST_ANSWER_BYTES = 8 * 1024 * 1024


class Posted(Value, frozen=True):
    """The parts of one bundle that S3 has accepted, by their hashes."""

    sha256: str = ""
    parts: tuple[str, ...] = ()


def post_bundle(
    ticket: Ticket,
    file: BinaryIO,
    sha256: str,
    size: int,
    progress: Path,
    on_bytes: Callable[[int], None],
) -> None:
    """Post a bundle; the file `progress` records the parts that S3 has.

    The index is posted last; only then does the bundle count. PolicyError if the ticket has
    expired.
    """
    if time.time() > ticket.expires.at:
        raise _make_expired_error(ticket)
    count = -(-size // ticket.part_bytes)
    if count > len(ticket.parts):
        raise PolicyError("the bundle is larger than the ticket allows", hint="labctl submit")
    posted = _read_progress(progress, sha256)
    parts = []
    for number in range(count):
        start = number * ticket.part_bytes
        span = (start, min(ticket.part_bytes, size - start))
        part = PostPart(sha256=_hash_part(file, *span), size=span[1])
        parts.append(part)
        if part.sha256 not in posted.parts:
            _post_part(ticket, ticket.parts[number], file, span, on_bytes)
            posted = Posted(sha256=sha256, parts=(*posted.parts, part.sha256))
            progress.write_bytes(msgspec.json.encode(posted))
        on_bytes(start + span[1])
    index = PostIndex(version=1, sha256=sha256, size=size, parts=tuple(parts))
    body = msgspec.json.encode(index)
    _post_part(ticket, ticket.index, io.BytesIO(body), (0, len(body)), lambda count: None)


def fetch_answers(ticket: Ticket) -> PostAnswers:
    """Fetch the receiver's answers so far; empty if it has not collected yet."""
    try:
        status, body = _send_request(ticket.receipts, "GET")
    except OSError as error:  # the errors of requests are OSErrors
        raise ConnectError(
            "the bucket cannot be reached",
            why=str(error),
            hint="labctl submit --receipts   # again, later",
        ) from None
    if status in (403, 404):
        # Without the right to list, S3 answers 403 for a missing object.
        if time.time() > ticket.expires.at:
            raise _make_expired_error(ticket)
        return PostAnswers()
    if status != 200:
        raise LabError(
            f"the bucket answered {status}",
            why=_error_text(body),
            hint="labctl submit --receipts   # again, later",
        )
    try:
        return decode_untrusted_json(body, PostAnswers)
    except ValueError as error:
        raise LabError(
            "the receiver's answer cannot be read",
            why=str(error),
            hint="labctl submit --receipts   # again; then tell your instructor",
        ) from None


def _post_part(
    ticket: Ticket,
    fields: Mapping[str, str],
    file: BinaryIO,
    span: tuple[int, int],
    on_bytes: Callable[[int], None],
) -> None:
    """Post once, and retry if the connection breaks."""

    def post() -> None:
        try:
            status, body = _send_request(
                ticket.url, "POST", _build_form(fields, file, span, on_bytes)
            )
        except OSError as error:
            raise LinkLostError(
                "the bucket cannot be reached", why=str(error), hint="labctl submit"
            ) from None
        if status not in (200, 201, 204):
            raise _make_refusal_error(ticket, status, body)

    policy = retry_on(
        BusyError, pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S, tries=TRIES
    )
    policy(post)


class _UploadPart:
    """A part of a file in the form that requests_toolbelt reads: `len` is what is left."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        file.seek(start)
        self._file = file
        self.len = length

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(self.len if size < 0 else min(size, self.len))
        self.len = self.len - len(block) if block else 0
        return block


def _build_form(
    fields: Mapping[str, str],
    file: BinaryIO,
    span: tuple[int, int],
    on_bytes: Callable[[int], None],
) -> requests_toolbelt.MultipartEncoderMonitor:
    """Build a form with one part of a file, which is read while it is sent."""
    start, length = span
    part = ("part", _UploadPart(file, start, length), "application/octet-stream")
    return requests_toolbelt.MultipartEncoderMonitor(
        requests_toolbelt.MultipartEncoder({**fields, "file": part}),
        lambda monitor: on_bytes(start + min(monitor.bytes_read, length)),
    )


def _send_request(
    url: str, method: str, form: MultipartEncoderMonitor | None = None
) -> tuple[int, bytes]:
    """Send one request without following redirects; return (status, body)."""
    headers = {} if form is None else {"Content-Type": form.content_type}
    with (
        open_session() as session,
        session.request(
            method,
            url,
            data=form,
            headers=headers,
            timeout=TIMEOUT_S,
            allow_redirects=False,
            stream=True,
        ) as response,
    ):
        body = read_body(response, MOST_ANSWER_BYTES + 1)
        if len(body) > MOST_ANSWER_BYTES:
            raise OSError(f"its answer has more than {MOST_ANSWER_BYTES} bytes")
        return response.status_code, body


def _make_refusal_error(ticket: Ticket, status: int, body: bytes) -> LabError:
    message = _error_text(body)
    if status >= 500:
        return BusyError(f"the bucket answered {status}", why=message, hint="labctl submit")
    if b"<Code>EntityTooLarge</Code>" in body:
        return PolicyError("the bundle is larger than the bucket accepts", why=message)
    # For a form that has expired, S3 has the code of every denied access: only its message says it.
    if "expired" in message.lower():
        return _make_expired_error(ticket)
    if status in (401, 403):
        return DeniedError(
            "the bucket does not accept your ticket",
            why=message,
            hint="ask your instructor for a new one, made with:\n"
            "labctl receive ticket DIR ASSIGNMENT YOUR-NAME",
        )
    if status == 404:
        return NotFoundError("the bucket of this assignment does not exist", why=message)
    return LabError(f"the bucket answered {status}", why=message, hint="labctl submit")


def _make_expired_error(ticket: Ticket) -> PolicyError:
    return PolicyError(
        f"your ticket expired on {ticket.expires}",
        why="a ticket for a bucket is valid for at most seven days",
        hint="ask your instructor for a new one, made with:\n"
        "labctl receive ticket DIR ASSIGNMENT YOUR-NAME",
    )


def _error_text(body: bytes) -> str:
    """Return the text of an S3 error without its XML tags."""
    text = re.sub(rb"<[^>]+>", b" ", body[:2000]).decode(errors="replace")
    return " ".join(text.split())[:300]


def _read_progress(progress: Path, sha256: str) -> Posted:
    try:
        posted = decode_untrusted_json(progress.read_bytes(), Posted)
    except (OSError, ValueError):
        return Posted()
    return posted if posted.sha256 == sha256 else Posted()


def _hash_part(file: BinaryIO, start: int, length: int) -> str:
    part, digest = _UploadPart(file, start, length), hashlib.sha256()
    while block := part.read(CHUNK_BYTES):
        digest.update(block)
    return digest.hexdigest()

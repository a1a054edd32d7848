"""Handing in through a bucket: parts posted by the student's ticket, then the index of them.

What S3 has accepted is kept beside the bundle, so that a broken upload goes on after the last part.
"""

from __future__ import annotations

import hashlib
import io
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

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
from labctl.model import Value
from labctl.retry import retry_on
from labctl.submissions.assignment import Ticket
from labctl.submissions.collect import Answers, Index, Part
from labctl.submissions.untrusted_json import decoded

if TYPE_CHECKING:
    from requests import Session
    from requests_toolbelt import MultipartEncoderMonitor

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


def post(
    ticket: Ticket,
    file: BinaryIO,
    sha256: str,
    size: int,
    progress: Path,
    on_bytes: Callable[[int], None],
) -> None:
    """Post a bundle; `progress` is where is kept what S3 has. PolicyError where the ticket is over.

    The index goes last, and only then does the bundle count.
    """
    if time.time() > ticket.expires.at:
        raise _over(ticket)
    count = -(-size // ticket.part_bytes)
    if count > len(ticket.parts):
        raise PolicyError("the bundle is larger than the ticket allows", hint="labctl submit")
    done = _known(progress, sha256)
    parts = []
    for number in range(count):
        start = number * ticket.part_bytes
        span = (start, min(ticket.part_bytes, size - start))
        part = Part(sha256=_hash(file, *span), size=span[1])
        parts.append(part)
        if part.sha256 not in done.parts:
            _post(ticket, ticket.parts[number], file, span, on_bytes)
            done = Posted(sha256=sha256, parts=(*done.parts, part.sha256))
            progress.write_bytes(msgspec.json.encode(done))
        on_bytes(start + span[1])
    index = Index(version=1, sha256=sha256, size=size, parts=tuple(parts))
    body = msgspec.json.encode(index)
    _post(ticket, ticket.index, io.BytesIO(body), (0, len(body)), lambda count: None)


def answers(ticket: Ticket) -> Answers:
    """What the receiver has answered so far; nothing where it has not looked yet."""
    try:
        status, body = _exchange(ticket.receipts, "GET")
    except OSError as error:  # what requests raises is one
        raise ConnectError(
            "the bucket cannot be reached",
            why=str(error),
            hint="labctl submit --receipts   # again, later",
        ) from None
    if status in (403, 404):
        # Who may not list is told 403 for what is not there.
        if time.time() > ticket.expires.at:
            raise _over(ticket)
        return Answers()
    if status != 200:
        raise LabError(
            f"the bucket answers {status}",
            why=_said(body),
            hint="labctl submit --receipts   # again, later",
        )
    try:
        return decoded(body, Answers)
    except ValueError as error:
        raise LabError(
            "the receiver's answer cannot be read",
            why=str(error),
            hint="labctl submit --receipts   # again; then tell your instructor",
        ) from None


def _post(
    ticket: Ticket,
    fields: Mapping[str, str],
    file: BinaryIO,
    span: tuple[int, int],
    on_bytes: Callable[[int], None],
) -> None:
    """One post, again where the link breaks."""

    def post() -> None:
        try:
            status, body = _exchange(ticket.url, "POST", _form(fields, file, span, on_bytes))
        except OSError as error:
            raise LinkLostError(
                "the bucket cannot be reached", why=str(error), hint="labctl submit"
            ) from None
        if status not in (200, 201, 204):
            raise _refused(ticket, status, body)

    policy = retry_on(
        BusyError, pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S, tries=TRIES
    )
    policy(post)


class _Span:
    """A part of a file, as the toolbelt reads it: `len` is what is left."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        file.seek(start)
        self._file = file
        self.len = length

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(self.len if size < 0 else min(size, self.len))
        self.len = self.len - len(block) if block else 0
        return block


def _form(
    fields: Mapping[str, str],
    file: BinaryIO,
    span: tuple[int, int],
    on_bytes: Callable[[int], None],
) -> MultipartEncoderMonitor:
    """A form with one part of a file, which is read while it is sent."""
    from requests_toolbelt import MultipartEncoder, MultipartEncoderMonitor

    start, length = span
    part = ("part", _Span(file, start, length), "application/octet-stream")
    return MultipartEncoderMonitor(
        MultipartEncoder({**fields, "file": part}),
        lambda monitor: on_bytes(start + min(monitor.bytes_read, length)),
    )


def _exchange(
    url: str, method: str, form: MultipartEncoderMonitor | None = None
) -> tuple[int, bytes]:
    """(status, body) of one request. No redirect is followed."""
    headers = {} if form is None else {"Content-Type": form.content_type}
    with _open_session() as session:
        answer = session.request(
            method,
            url,
            data=form,
            headers=headers,
            timeout=TIMEOUT_S,
            allow_redirects=False,
            stream=True,
        )
        body = bytearray()
        for block in answer.iter_content(CHUNK_BYTES):
            body += block
            if len(body) > MOST_ANSWER_BYTES:
                raise OSError(f"it answers with more than {MOST_ANSWER_BYTES} bytes")
        return answer.status_code, bytes(body)


def _open_session() -> Session:
    """One that trusts this machine's authorities, too, and sends nobody's password."""
    import ssl

    import requests
    from requests.adapters import HTTPAdapter

    class SystemTrust(HTTPAdapter):
        def init_poolmanager(self, *words: Any, **more: Any) -> None:
            super().init_poolmanager(*words, ssl_context=ssl.create_default_context(), **more)

    session = requests.Session()
    session.auth = lambda request: request  # else requests looks into ~/.netrc
    session.mount("https://", SystemTrust())
    return session


def _refused(ticket: Ticket, status: int, body: bytes) -> LabError:
    said = _said(body)
    if status >= 500:
        return BusyError(f"the bucket answers {status}", why=said, hint="labctl submit")
    if "EntityTooLarge" in said:
        return PolicyError("the bundle is larger than the bucket takes", why=said)
    if "expired" in said.lower():
        return _over(ticket)
    if status in (401, 403):
        return DeniedError(
            "the bucket does not take your ticket",
            why=said,
            hint="ask your instructor for a new one: labctl receive ticket",
        )
    if status == 404:
        return NotFoundError("the bucket of this assignment is not there", why=said)
    return LabError(f"the bucket answers {status}", why=said, hint="labctl submit")


def _over(ticket: Ticket) -> PolicyError:
    return PolicyError(
        f"your ticket is over since {ticket.expires}",
        why="a ticket for a bucket is good for seven days at most",
        hint="ask your instructor for a new one: labctl receive ticket",
    )


def _said(body: bytes) -> str:
    """What an error of S3's says, its tags taken away."""
    text = re.sub(rb"<[^>]+>", b" ", body[:2000]).decode(errors="replace")
    return " ".join(text.split())[:300]


def _known(progress: Path, sha256: str) -> Posted:
    try:
        found = decoded(progress.read_bytes(), Posted)
    except (OSError, ValueError):
        return Posted()
    return found if found.sha256 == sha256 else Posted()


def _hash(file: BinaryIO, start: int, length: int) -> str:
    span, digest = _Span(file, start, length), hashlib.sha256()
    while block := span.read(CHUNK_BYTES):
        digest.update(block)
    return digest.hexdigest()

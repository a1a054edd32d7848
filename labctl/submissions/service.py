"""The forced command of a student's connection: JSON lines on standard input and output.

    hello     assignment                                -> the rules for this student now
    begin     assignment sha256 size                    -> offset, or signed if accepted before
    part      assignment sha256 size offset length, bytes -> offset
    finish    assignment sha256 size                    -> signed
    receipts  assignment                                -> receipts, the student's own
    feedback  assignment                                -> feedback, the student's own, or null,
                                                           and their regrade requests
    regrade   assignment text                           -> number

A failure is {"error": {kind, what, why, hint}}. There are no other requests: no bundle is ever
returned, and only the forced command names the student.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from labctl.errors import DiskFullError, LabError, PolicyError, UsageError
from labctl.errors.replies import as_reply
from labctl.model import make_record
from labctl.submissions import REQUEST
from labctl.submissions.receipt import Signed
from labctl.submissions.receiver import Hello, Receiver
from labctl.submissions.student_requests import parse_student_request
from labctl.wire.codec import to_json
from labctl.wire.receiver import (
    ASK_REGRADE,
    BEGIN_UPLOAD,
    FINISH_UPLOAD,
    GREET_RECEIVER,
    LIST_RECEIPTS,
    READ_FEEDBACK,
    SEND_PART,
    AskRegradeReply,
    AskRegradeRequest,
    BeginUploadReply,
    BeginUploadRequest,
    DeadlineRecord,
    FinishUploadReply,
    GreetReceiverReply,
    GreetReceiverRequest,
    ListReceiptsReply,
    ListReceiptsRequest,
    ReadFeedbackReply,
    ReadFeedbackRequest,
    ReceiverGreetingRecord,
    ReceiverRequest,
    RegradeRecord,
    SendPartReply,
    SendPartRequest,
    TotalRecord,
)
from labctl.wire.verbs import Verb

# A regrade request of 1000 characters, as JSON writes them outside ASCII, is 12 kB.
MOST_LINE_BYTES = 16 * 1024
PART_BYTES = 8 * 1024 * 1024
VERBS: dict[str, Verb[Any, Any]] = {
    verb.name: verb
    for verb in (
        GREET_RECEIVER,
        BEGIN_UPLOAD,
        SEND_PART,
        FINISH_UPLOAD,
        LIST_RECEIPTS,
        READ_FEEDBACK,
        ASK_REGRADE,
    )
}


class CourseRequests(Protocol):
    """What a course adds to its receiver: free days, totals, and requests for a regrade."""

    def read_free_days(self, assignment: str, student: str) -> tuple[int, int]:
        """Return the free late days of the term, and how many of them the student still has."""

    def record_request(self, assignment: str, student: str, text: str) -> int:
        """Record a request and return its number; PolicyError if it is not allowed now."""

    def list_for(self, assignment: str, student: str) -> tuple[RegradeRecord, ...]:
        """Return the student's own requests."""

    def read_total(self, student: str) -> TotalRecord | None:
        """Return the student's total of released grades; None if the course computes none."""


def check_request(original: str) -> None:
    """Raise PolicyError if a student's ssh requested anything but this service.

    `original` is SSH_ORIGINAL_COMMAND. It is compared, never executed.
    """
    if original not in ("", REQUEST):
        raise PolicyError(
            f"{original[:80]!a} cannot be run here",
            why="this key is only for submissions",
            hint="labctl submit",
        )


def serve(
    receiver: Receiver,
    student: str,
    source: BinaryIO,
    sink: BinaryIO,
    alive: Callable[[], None] = lambda: None,
    course: Callable[[], CourseRequests] | None = None,
) -> None:
    """Answer one student's requests until the input ends. `alive` is called for each.

    `course` opens the receiver's course when a request needs it; None for a receiver without one.
    """
    while line := source.readline(MOST_LINE_BYTES):
        alive()
        part = b""
        try:
            request = _read_request(line, student)
            if isinstance(request, SendPartRequest):
                part = _read_bytes(source, request.length)
        except LabError as error:
            # The rest of the input cannot be told from a part's bytes any more.
            _send_reply(sink, as_reply(error))
            return
        except EOFError:
            return
        try:
            reply = _answer_request(receiver, student, request, part, course)
        except LabError as error:
            reply = as_reply(error)
        except OSError as error:
            reply = as_reply(_make_disk_error(error))
        _send_reply(sink, reply)


def refuse(sink: BinaryIO, error: LabError) -> None:
    """Reply with an error, before any request was read."""
    _send_reply(sink, as_reply(error))


def _read_request(line: bytes, student: str) -> ReceiverRequest:
    request: ReceiverRequest
    _, request = parse_student_request(line, VERBS, student)
    if isinstance(request, SendPartRequest) and not 0 <= request.length <= PART_BYTES:
        raise UsageError(f"a part can have at most {PART_BYTES} bytes")
    return request


def _answer_request(
    receiver: Receiver,
    student: str,
    request: ReceiverRequest,
    part: bytes,
    course: Callable[[], CourseRequests] | None,
) -> NamedTuple:
    name = request.assignment
    if isinstance(request, GreetReceiverRequest):
        hello = _add_free_days(receiver.hello(name, student), name, student, course)
        return GreetReceiverReply(make_record(ReceiverGreetingRecord, hello))
    if isinstance(request, ListReceiptsRequest):
        receipts = receiver.receipts(name, student)
        standings = [receiver.judge_receipt(one.receipt) for one in receipts]
        return ListReceiptsReply(
            tuple(receipts), tuple(make_record(DeadlineRecord, one) for one in standings)
        )
    if isinstance(request, ReadFeedbackRequest):
        feedback = receiver.feedback(name, student)
        if course is None:
            return ReadFeedbackReply(feedback)
        desk = course()
        return ReadFeedbackReply(feedback, desk.list_for(name, student), desk.read_total(student))
    if isinstance(request, AskRegradeRequest):
        if course is None:
            raise PolicyError(
                "this receiver takes no regrade requests",
                why="it does not belong to a course",
                hint="labctl submit --grade   # your grade; ask your instructor about it",
            )
        return AskRegradeReply(course().record_request(name, student, request.text))
    bundle = (name, student, request.sha256, request.size)
    if isinstance(request, SendPartRequest):
        return SendPartReply(receiver.write(*bundle, request.offset, part))
    if isinstance(request, BeginUploadRequest):
        result = receiver.begin(*bundle)
        if isinstance(result, Signed):
            return BeginUploadReply(signed=result)
        return BeginUploadReply(offset=result)
    return FinishUploadReply(receiver.finish(*bundle))


def _add_free_days(
    hello: Hello, name: str, student: str, course: Callable[[], CourseRequests] | None
) -> Hello:
    if course is None or not hello.penalty:
        return hello
    try:
        total, left = course().read_free_days(name, student)
    except LabError:
        return hello  # a mistake in course.yaml stops no submission
    return msgspec.structs.replace(hello, free_days=total, free_days_left=left)


def _read_bytes(source: BinaryIO, length: int) -> bytes:
    """Read a whole part before anything is locked: the connection may break in the middle."""
    blocks = []
    while length:
        block = source.read(length)
        if not block:
            raise EOFError
        blocks.append(block)
        length -= len(block)
    return b"".join(blocks)


def _make_disk_error(error: OSError) -> LabError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = DiskFullError if is_full else LabError
    message = "the receiver's disk is full" if is_full else "the receiver cannot write"
    return kind(message, why=f"{error.strerror}; tell your instructor")


def _send_reply(sink: BinaryIO, reply: NamedTuple) -> None:
    """Write a reply as JSON. What an upload, feedback or a list does not have is left out."""
    left_out = isinstance(reply, BeginUploadReply | ListReceiptsReply | ReadFeedbackReply)
    sink.write(msgspec.json.encode(to_json(reply, drop_defaults=left_out)) + b"\n")
    sink.flush()

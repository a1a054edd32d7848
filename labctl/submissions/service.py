"""The forced command of a student's connection: JSON lines on standard input and output.

    hello     assignment                                -> the rules for this student now
    begin     assignment sha256 size                    -> offset, or signed if accepted before
    part      assignment sha256 size offset length, bytes -> offset
    finish    assignment sha256 size                    -> signed
    receipts  assignment                                -> receipts, the student's own
    feedback  assignment                                -> feedback, the student's own, or null

A failure is {"error": {kind, what, why, hint}}. There are no other requests: no bundle is ever
returned, and only the forced command names the student.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from labctl.errors import DiskFullError, LabError, PolicyError, UsageError
from labctl.submissions import REQUEST
from labctl.submissions.receipt import Signed
from labctl.submissions.receiver import Receiver

MOST_LINE_BYTES = 4096
PART_BYTES = 8 * 1024 * 1024
FIELDS = {
    "hello": {"assignment"},
    "begin": {"assignment", "sha256", "size"},
    "part": {"assignment", "sha256", "size", "offset", "length"},
    "finish": {"assignment", "sha256", "size"},
    "receipts": {"assignment"},
    "feedback": {"assignment"},
}
_TYPES: dict[str, type] = {
    "assignment": str, "sha256": str, "size": int, "offset": int, "length": int,
}  # fmt: skip


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
) -> None:
    """Answer one student's requests until the input ends. `alive` is called for each."""
    while line := source.readline(MOST_LINE_BYTES):
        alive()
        part = b""
        try:
            request = _read_request(line, student)
            part = _read_bytes(source, request.get("length", 0))
        except LabError as error:
            # The rest of the input cannot be told from a part's bytes any more.
            _send_reply(sink, _error_reply(error))
            return
        except EOFError:
            return
        try:
            reply = _answer_request(receiver, student, request, part)
        except LabError as error:
            reply = _error_reply(error)
        except OSError as error:
            reply = _error_reply(_disk_error(error))
        _send_reply(sink, reply)


def refuse(sink: BinaryIO, error: LabError) -> None:
    """Reply with an error, before any request was read."""
    _send_reply(sink, _error_reply(error))


def _read_request(line: bytes, student: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
        fields = FIELDS[request["do"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError("this is not a valid request") from None
    other = request.get("student", student)
    if other != student:
        raise PolicyError(
            f"this key belongs to {student}, not to {str(other)[:60]!a}",
            why="every student submits with a key of their own",
        )
    names = set(request) - {"do", "student"}
    if names != fields or any(type(request[key]) is not _TYPES[key] for key in fields):
        raise UsageError(f"{request['do']} takes {', '.join(sorted(fields))}")
    if not 0 <= request.get("length", 0) <= PART_BYTES:
        raise UsageError(f"a part can have at most {PART_BYTES} bytes")
    checked: dict[str, Any] = request
    return checked


def _answer_request(
    receiver: Receiver, student: str, request: dict[str, Any], part: bytes
) -> dict[str, Any]:
    name = request["assignment"]
    bundle = (name, student, request.get("sha256", ""), request.get("size", 0))
    if request["do"] == "hello":
        return {"hello": receiver.hello(name, student)}
    if request["do"] == "receipts":
        return {"receipts": receiver.receipts(name, student)}
    if request["do"] == "feedback":
        return {"feedback": receiver.feedback(name, student)}
    if request["do"] == "part":
        return {"offset": receiver.write(*bundle, request["offset"], part)}
    if request["do"] == "finish":
        return {"signed": receiver.finish(*bundle)}
    result = receiver.begin(*bundle)
    return {"signed": result} if isinstance(result, Signed) else {"offset": result}


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


def _error_reply(error: LabError) -> dict[str, Any]:
    kind = type(error).__name__
    return {"error": {"kind": kind, "what": error.what, "why": error.why, "hint": error.hint}}


def _disk_error(error: OSError) -> LabError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = DiskFullError if is_full else LabError
    message = "the receiver's disk is full" if is_full else "the receiver cannot write"
    return kind(message, why=f"{error.strerror}; tell your instructor")


def _send_reply(sink: BinaryIO, reply: dict[str, Any]) -> None:
    sink.write(msgspec.json.encode(reply) + b"\n")
    sink.flush()

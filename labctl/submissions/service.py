"""One student's connection, as a forced command: JSON lines on standard input and output.

    hello     assignment                                -> the rules for this student now
    begin     assignment sha256 size                    -> offset; signed: it was here before
    part      assignment sha256 size offset length, bytes -> offset
    finish    assignment sha256 size                    -> signed
    receipts  assignment                                -> receipts, the student's own
    feedback  assignment                                -> feedback, the student's own, or null

A failure is {"error": {kind, what, why, hint}}. Nothing else can be asked: no bundle comes back,
and who the student is stands in the forced command alone.
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
    """PolicyError where a student's ssh asked for anything but this service.

    `original` is SSH_ORIGINAL_COMMAND. It is compared, never run.
    """
    if original not in ("", REQUEST):
        raise PolicyError(
            f"{original[:80]!a} cannot be run here",
            why="this key hands in submissions, and nothing else",
            hint="labctl submit",
        )


def serve(
    receiver: Receiver,
    student: str,
    source: BinaryIO,
    sink: BinaryIO,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Answer one student's requests until there are no more. `alive` is called at each."""
    while line := source.readline(MOST_LINE_BYTES):
        alive()
        part = b""
        try:
            asked = _read(line, student)
            part = _bytes(source, asked.get("length", 0))
        except LabError as error:
            # What follows cannot be told from a request any more.
            _say(sink, _failure(error))
            return
        except EOFError:
            return
        try:
            said = _answer(receiver, student, asked, part)
        except LabError as error:
            said = _failure(error)
        except OSError as error:
            said = _failure(_of_disk(error))
        _say(sink, said)


def refuse(sink: BinaryIO, error: LabError) -> None:
    """Answer a student who gets no further with an error."""
    _say(sink, _failure(error))


def _read(line: bytes, student: str) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        wanted = FIELDS[asked["do"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError("this is no request") from None
    other = asked.get("student", student)
    if other != student:
        raise PolicyError(
            f"this key is {student}'s, not {str(other)[:60]!a}'s",
            why="everybody hands in with a key of their own",
        )
    given = set(asked) - {"do", "student"}
    if given != wanted or any(type(asked[key]) is not _TYPES[key] for key in wanted):
        raise UsageError(f"{asked['do']} takes {', '.join(sorted(wanted))}")
    if not 0 <= asked.get("length", 0) <= PART_BYTES:
        raise UsageError(f"a part has at most {PART_BYTES} bytes")
    found: dict[str, Any] = asked
    return found


def _answer(receiver: Receiver, student: str, asked: dict[str, Any], part: bytes) -> dict[str, Any]:
    name = asked["assignment"]
    about = (name, student, asked.get("sha256", ""), asked.get("size", 0))
    if asked["do"] == "hello":
        return {"hello": receiver.hello(name, student)}
    if asked["do"] == "receipts":
        return {"receipts": receiver.receipts(name, student)}
    if asked["do"] == "feedback":
        return {"feedback": receiver.feedback(name, student)}
    if asked["do"] == "part":
        return {"offset": receiver.write(*about, asked["offset"], part)}
    if asked["do"] == "finish":
        return {"signed": receiver.finish(*about)}
    begun = receiver.begin(*about)
    return {"signed": begun} if isinstance(begun, Signed) else {"offset": begun}


def _bytes(source: BinaryIO, length: int) -> bytes:
    """All of a part before anything is locked: a link may die in the middle of it."""
    blocks = []
    while length:
        block = source.read(length)
        if not block:
            raise EOFError
        blocks.append(block)
        length -= len(block)
    return b"".join(blocks)


def _failure(error: LabError) -> dict[str, Any]:
    kind = type(error).__name__
    return {"error": {"kind": kind, "what": error.what, "why": error.why, "hint": error.hint}}


def _of_disk(error: OSError) -> LabError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = DiskFullError if full else LabError
    what = "the receiver's disk is full" if full else "the receiver cannot write"
    return kind(what, why=f"{error.strerror}; tell your instructor")


def _say(sink: BinaryIO, reply: dict[str, Any]) -> None:
    sink.write(msgspec.json.encode(reply) + b"\n")
    sink.flush()

"""Replies of the agent: marked JSON lines, and failures as values."""

from __future__ import annotations

import sys
from typing import NamedTuple

from ..wire.codec import decode, encode
from ..wire.verbs import ErrorMessage, ErrorReply, Hint, Reply, Request, Verb, make_error

MARK = "\x1elabctl "


class Failure(Exception):
    """A failure that the client raises as a LabError; `kind` selects which one."""

    def __init__(self, kind: str, what: str, why: str = "", hint: Hint = "") -> None:
        super().__init__(what)
        self.report = make_error(kind, what, why, hint)

    @classmethod
    def relay(cls, report: ErrorMessage) -> Failure:
        """Return the failure that another process of this program reported."""
        failure = cls(report.kind, report.what)
        failure.report = report
        return failure


def encode_line(reply: NamedTuple) -> bytes:
    return (MARK + encode(reply) + "\n").encode()


def send_reply(reply: NamedTuple) -> None:
    """Write the reply to standard output; raw bytes may follow it."""
    sys.stdout.buffer.write(encode_line(reply))
    sys.stdout.buffer.flush()


def send_closing_reply(reply: NamedTuple) -> None:
    """Write the closing reply of a streaming verb to standard error."""
    sys.stderr.buffer.write(encode_line(reply))
    sys.stderr.buffer.flush()


def parse_reply(verb: Verb[Request, Reply], stdout: str, stderr: str) -> Reply:
    """Parse the reply of another process of this program, and raise its Failure if it has one."""
    for text in (stdout, stderr):
        start = text.rfind(MARK)
        if start >= 0:
            line = text[start + len(MARK) :].split("\n", 1)[0]
            error = decode(ErrorReply, line).error
            if error is not None:
                raise Failure.relay(error)
            return decode(verb.reply, line)
    what = f"the agent's {verb.name} ended without a reply"
    raise Failure("server", what, stderr.strip()[-1000:])

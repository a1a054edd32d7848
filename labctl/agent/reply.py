"""Replies of the agent: marked JSON lines, and failures as values."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple, Union

from ..wire.codec import from_json, to_json
from ..wire.verbs import ErrorMessage

MARK = "\x1elabctl "


class Failure(Exception):
    """A failure that the client raises as a LabError; `kind` selects which one."""

    def __init__(self, kind: str, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.report = ErrorMessage(kind, what, why, hint)


# A reply of a verb that has messages, or the JSON object of one that does not yet.
Reply = Union[NamedTuple, "dict[str, Any]"]


def encode_line(reply: Reply) -> bytes:
    return (MARK + json.dumps(to_json(reply), separators=(",", ":")) + "\n").encode()


def encode_error(failure: Failure) -> dict[str, Any]:
    """Return the JSON object that reports a failure in place of a reply."""
    return {"error": to_json(failure.report)}


def send_reply(body: Reply) -> None:
    """Write the reply to standard output; raw bytes may follow it."""
    sys.stdout.buffer.write(encode_line(body))
    sys.stdout.buffer.flush()


def send_closing_reply(body: Reply) -> None:
    """Write the closing reply of a streaming verb to standard error."""
    sys.stderr.buffer.write(encode_line(body))
    sys.stderr.buffer.flush()


def parse_reply(verb: str, stdout: str, stderr: str) -> dict[str, Any]:
    """Parse the reply of another process of this program, and raise its Failure if it has one."""
    for text in (stdout, stderr):
        start = text.rfind(MARK)
        if start >= 0:
            body: dict[str, Any] = json.loads(text[start + len(MARK) :].split("\n", 1)[0])
            if "error" in body:
                raise Failure(*from_json(ErrorMessage, body["error"]))
            return body
    raise Failure("server", f"the agent's {verb} ended without a reply", stderr.strip()[-1000:])

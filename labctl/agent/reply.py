"""Replies of the agent: marked JSON lines, and failures as values."""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "\x1elabctl "


class Failure(Exception):
    """A failure that the client raises as a LabError; `kind` selects which one."""

    def __init__(self, kind: str, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.body = {"kind": kind, "what": what, "why": why, "hint": hint}


def encode_line(body: dict[str, Any]) -> bytes:
    return (MARK + json.dumps(body, separators=(",", ":")) + "\n").encode()


def send_reply(body: dict[str, Any]) -> None:
    """Write the reply to standard output; raw bytes may follow it."""
    sys.stdout.buffer.write(encode_line(body))
    sys.stdout.buffer.flush()


def send_closing_reply(body: dict[str, Any]) -> None:
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
                raise Failure(**body["error"])
            return body
    raise Failure("server", f"the agent's {verb} ended without a reply", stderr.strip()[-1000:])

"""How the program answers: marked lines, and failures as values."""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "\x1elabctl "


class Failure(Exception):
    """Something the client turns into a LabError. `kind` names which one."""

    def __init__(self, kind: str, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.body = {"kind": kind, "what": what, "why": why, "hint": hint}


def line(body: dict[str, Any]) -> bytes:
    return (MARK + json.dumps(body, separators=(",", ":")) + "\n").encode()


def answer(body: dict[str, Any]) -> None:
    """The one reply on standard output; raw bytes may follow it."""
    sys.stdout.buffer.write(line(body))
    sys.stdout.buffer.flush()


def finish(body: dict[str, Any]) -> None:
    """The closing reply of a verb that streams, on standard error."""
    sys.stderr.buffer.write(line(body))
    sys.stderr.buffer.flush()


def reply_of(verb: str, stdout: str, stderr: str) -> dict[str, Any]:
    """What another process of this program answered; its failure is raised here."""
    for text in (stdout, stderr):
        start = text.rfind(MARK)
        if start >= 0:
            said: dict[str, Any] = json.loads(text[start + len(MARK) :].split("\n", 1)[0])
            if "error" in said:
                raise Failure(**said["error"])
            return said
    raise Failure("server", f"{verb} ended without an answer", stderr.strip()[-1000:])

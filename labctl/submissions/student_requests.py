"""A student's request in one line of JSON, to the keeper of a course or to its receiver."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from labctl.errors import PolicyError, UsageError
from labctl.wire.codec import MessageError
from labctl.wire.line_requests import convert_request
from labctl.wire.verbs import Verb


def parse_student_request(
    line: bytes, verbs: Mapping[str, Verb[Any, Any]], student: str
) -> tuple[str, Any]:
    """Return the name of a request's verb, one of `verbs`, and its message.

    `student` is whom the key of the connection belongs to: PolicyError if the request names another
    one, UsageError if it is not valid.
    """
    try:
        body = json.loads(line)
        verb = verbs[body["do"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError("this is not a valid request") from None
    other = body.get("student", student)
    if other != student:
        raise PolicyError(
            f"this key belongs to {student}, not to {str(other)[:60]!a}",
            why="every student has a key of their own",
        )
    try:
        return verb.name, convert_request(verb, body)
    except MessageError as error:
        raise UsageError(str(error)) from None

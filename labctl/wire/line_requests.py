"""Requests of one line of JSON to a forced command: {"do": VERB, and the fields of its message}.

A request may also name the student, who must be the one that the forced command knows.
"""

import json
from typing import Any, Dict, Set

from .codec import MessageError, from_json, to_json
from .verbs import Reply, Request, Verb


def encode_request(verb: Verb[Request, Reply], request: Request) -> bytes:
    """Return the line, with its end."""
    return json.dumps({"do": verb.name, **to_json(request)}).encode() + b"\n"


def convert_request(verb: Verb[Request, Any], body: Dict[str, object]) -> Request:
    """Convert a parsed line to its message. MessageError unless it has exactly these fields."""
    fields: Set[str] = set(verb.request._fields)
    if set(body) - {"do", "student"} != fields:
        raise MessageError(describe_fields(verb))
    try:
        return from_json(verb.request, body)
    except MessageError:
        raise MessageError(describe_fields(verb)) from None


def describe_fields(verb: Verb[Any, Any]) -> str:
    return f"{verb.name} takes {', '.join(sorted(verb.request._fields)) or 'nothing'}"

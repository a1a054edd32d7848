"""Errors that one labctl sends another: JSON on the wire, the same LabError at the other end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from labctl import errors
from labctl.errors import CommandError, ConfigError, LabError
from labctl.wire.codec import MessageError, from_json
from labctl.wire.verbs import Reply, Request, Verb

MOST_CHARS = 2000


def as_reply(error: LabError) -> dict[str, dict[str, str]]:
    """Encode an error as the JSON object that `parse_error` decodes.

    An error that is defined elsewhere is sent as the class of this room that it inherits from.
    """
    names = (each.__name__ for each in type(error).__mro__ if each in vars(errors).values())
    kind, why = next(names), error.why
    if isinstance(error, ConfigError) and error.problems:
        why = "\n".join(f"{p.path} (line {p.line}): {p.message}" for p in error.problems)
    return {"error": {"kind": kind, "what": error.what, "why": why, "hint": error.hint}}


def parse_error(body: Mapping[str, object]) -> LabError | None:
    """Return the error that a reply reports, or None for any other reply.

    A kind that this version does not know becomes a plain LabError. Texts are cut: the other side
    may be hostile.
    """
    fields = body.get("error")
    if not isinstance(fields, dict):
        return None
    kind = getattr(errors, str(fields.get("kind")), LabError)
    # A CommandError needs an exit code, which a reply does not carry.
    if not (isinstance(kind, type) and issubclass(kind, LabError)) or kind is CommandError:
        kind = LabError
    what, why, hint = (str(fields.get(key, ""))[:MOST_CHARS] for key in ("what", "why", "hint"))
    error: LabError = kind(what or "the other side refused", why=why, hint=hint)
    return error


def parse_reply(output: str) -> dict[str, Any] | None:
    """Parse output as one JSON object; None for anything else."""
    try:
        body = json.loads(output)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def decode_reply(verb: Verb[Request, Reply], line: bytes) -> Reply:
    """Return the reply on a line, or raise the error that it reports.

    MessageError if the line is neither; its text is the line or names the wrong field.
    """
    text = line.decode(errors="replace")
    body = parse_reply(text)
    if body is None:
        raise MessageError(text[-500:])
    if (error := parse_error(body)) is not None:
        raise error
    return from_json(verb.reply, body)


def describe_error(error: LabError) -> str:
    """An error in one line, without its hint."""
    why = as_reply(error)["error"]["why"].replace("\n", "; ")
    return ": ".join(filter(None, [error.what, why]))

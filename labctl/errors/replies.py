"""Failures that one labctl program sends another: an `ErrorReply` on the wire, a LabError here.

The kind of a failure is the name of its class in `labctl.errors`. The agent does not have these
classes; it sends the kinds of AGENT_KINDS. Any other kind is a plain LabError.
"""

from __future__ import annotations

import json

from labctl import errors
from labctl.errors import (
    CommandError,
    ConfigError,
    DiskFullError,
    EngineError,
    LabError,
    NameTakenError,
    NotFoundError,
    PolicyError,
    TransferError,
    UsageError,
)
from labctl.wire.codec import Message, MessageError, from_json
from labctl.wire.verbs import ErrorMessage, ErrorReply

MOST_CHARS = 2000
AGENT_KINDS: dict[str, type[LabError]] = {
    "usage": UsageError,
    "policy": PolicyError,
    "taken": NameTakenError,
    "missing": NotFoundError,
    "engine": EngineError,
    "disk": DiskFullError,
    "link": TransferError,
}


def as_reply(error: LabError) -> ErrorReply:
    """Return the reply that reports this error.

    An error that is defined elsewhere is sent as the class of this room that it inherits from.
    """
    names = (each.__name__ for each in type(error).__mro__ if each in vars(errors).values())
    return ErrorReply(ErrorMessage(next(names), error.what, _describe_cause(error), error.hint))


def make_error(failure: ErrorMessage) -> LabError:
    """Return the error that a reply reports, of the class that its kind names."""
    kind = AGENT_KINDS.get(failure.kind) or vars(errors).get(failure.kind)
    # A CommandError needs an exit code, which a reply does not carry.
    if not (isinstance(kind, type) and issubclass(kind, LabError)) or kind is CommandError:
        kind = LabError
    error: LabError = kind(
        failure.what or "the other side refused",
        why=failure.why,
        hint=lambda subject: subject.render(failure.hint_parts, failure.hint),
    )
    return error


def decode_reply(kind: type[Message], line: str | bytes) -> Message:
    """Decode one line of JSON from another labctl, which may be hostile.

    Raises the LabError that the reply reports, with its texts cut and without parts of a hint;
    MessageError if the line is neither that nor a message of this kind; its text is the line or
    names the wrong field.
    """
    text = line if isinstance(line, str) else line.decode(errors="replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageError(text[-500:]) from None
    failure = from_json(ErrorReply, body).error
    if failure is not None:
        name, what, why, hint = (part[:MOST_CHARS] for part in failure[:4])
        raise make_error(ErrorMessage(name, what, why, hint))
    return from_json(kind, body)


def describe_error(error: LabError) -> str:
    """An error in one line, without its hint."""
    why = _describe_cause(error).replace("\n", "; ")
    return ": ".join(filter(None, [error.what, why]))


def _describe_cause(error: LabError) -> str:
    """Return why an error happened; of a file with mistakes, all of them, one a line."""
    if isinstance(error, ConfigError) and error.problems:
        return "\n".join(f"{p.path} (line {p.line}): {p.message}" for p in error.problems)
    return error.why

"""Errors that one labctl tells another: as JSON on its way, as the same LabError at its end."""

from __future__ import annotations

import json
from typing import Any

from labctl import errors
from labctl.errors import CommandError, ConfigError, LabError


def as_reply(error: LabError) -> dict[str, Any]:
    """What `raised` makes the same error of."""
    kind, why = type(error).__name__, error.why
    if isinstance(error, ConfigError):
        why = "\n".join(f"{one.path} (line {one.line}): {one.message}" for one in error.problems)
    return {"error": {"kind": kind, "what": error.what, "why": why, "hint": error.hint}}


def raised(body: dict[str, Any]) -> LabError | None:
    """The error that a reply stands for; None where it is none."""
    told = body.get("error")
    if not isinstance(told, dict):
        return None
    kind = getattr(errors, str(told.get("kind")), LabError)
    if not (isinstance(kind, type) and issubclass(kind, LabError)) or kind is CommandError:
        kind = LabError
    what, why, hint = (str(told.get(key, "")) for key in ("what", "why", "hint"))
    made: LabError = kind(what, why=why, hint=hint)
    return made


def reply_in(output: str) -> dict[str, Any] | None:
    """The JSON object that some output is; None where it is none."""
    try:
        body = json.loads(output)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None

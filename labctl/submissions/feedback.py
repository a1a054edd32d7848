"""Stored feedback on a grade, which a student can fetch once it is released."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from labctl.errors import LabError
from labctl.model import Value
from labctl.submissions.untrusted_json import decode_untrusted_json


class Feedback(Value, frozen=True, forbid_unknown_fields=True):
    """The feedback on submission `number`, as plain `text` and as an HTML `page` without scripts.

    `score` is the final score out of `points`.
    """

    assignment: str
    number: int
    score: float
    points: float
    text: str
    page: str
    version: int = 1

    def without_page(self) -> Feedback:
        return msgspec.structs.replace(self, page="")


def read(file: Path) -> Feedback | None:
    """Read released feedback, or None if nothing was released."""
    try:
        return decode_untrusted_json(file.read_bytes(), Feedback)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LabError(f"{file} is damaged", why=str(error)) from None


def write(file: Path, feedback: Feedback | None) -> None:
    """Replace the file atomically, readable only by its owner; None deletes it."""
    if feedback is None:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_suffix(".new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(msgspec.json.encode(feedback))
    draft.replace(file)

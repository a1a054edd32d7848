"""What a student may read of a grade, once staff has released it: kept and handed out as it is."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from labctl.errors import LabError
from labctl.model import Value
from labctl.submissions.untrusted_json import decoded


class Feedback(Value, frozen=True, forbid_unknown_fields=True):
    """`text` in plain words, `page` the same as HTML in which nothing is active. `score` is what
    counts, out of `points`, of submission `number`."""

    assignment: str
    number: int
    score: float
    points: float
    text: str
    page: str
    version: int = 1


def read(file: Path) -> Feedback | None:
    """None where nothing was released."""
    try:
        return decoded(file.read_bytes(), Feedback)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LabError(f"{file} is damaged", why=str(error)) from None


def write(file: Path, found: Feedback | None) -> None:
    """Replace the file whole, for its owner alone; None takes it away."""
    if found is None:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_suffix(".new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(msgspec.json.encode(found))
    draft.replace(file)

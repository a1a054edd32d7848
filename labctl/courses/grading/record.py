"""What labctl keeps of one graded submission beside its results.json: for staff, never students."""

from __future__ import annotations

from typing import Literal

import msgspec

from labctl.courses.grading.claims import Comparison
from labctl.courses.grading.flags import Flag
from labctl.courses.grading.results import Results, stamped
from labctl.model import Value

VERSION = 1
FILE, RESULTS, OUTPUT = "grade.json", "results.json", "output.txt"
FEEDBACK = "feedback.html"
# `failed`: the submission's own program came to no answer. `error`: grading it did not work.
Outcome = Literal["graded", "failed", "error"]
WORDS = {
    "exit": "its program ended with {code}",
    "time": "its program did not end in time",
    "memory": "its program needed more memory than there is",
    "large": "its program wrote more than may be read",
    "none": "its program wrote no predictions",
}


class Record(Value, frozen=True):
    """One submission's grade. `key` is of all that went into it: the same key, the same grade.

    `raw` is the grader's word, before a penalty; `score` what counts. `said` is whether the
    submission's program printed anything.
    """

    assignment: str
    seat: str
    students: tuple[str, ...]
    student: str
    number: int
    received: str
    bundle_sha256: str
    key: str
    outcome: Outcome
    points: float
    late_s: int = 0
    penalty: int = 0
    raw: Results | None = None
    score: float | None = None
    comparison: Comparison = Comparison()
    flags: tuple[Flag, ...] = ()
    told: str = ""
    said: bool = False
    seconds: float = 0.0
    image: str = ""
    at: float = 0.0
    version: int = VERSION


def encode(record: Record) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes) -> Record | None:
    """None for what is no record of this version: it is made again."""
    try:
        found = msgspec.json.decode(data, type=Record)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return found if found.version == VERSION else None


def told_of(outcome: str, code: int) -> str:
    """How a submission's program ended, in words."""
    return WORDS.get(outcome, "its program ended strangely").format(code=code)


def results_of(record: Record) -> Results:
    """results.json of a graded submission, with what labctl adds under extra_data.labctl."""
    assert record.raw is not None
    facts = {
        "submission": record.number,
        "received": record.received,
        "bundle_sha256": record.bundle_sha256,
        "claim": record.comparison,
    }
    return stamped(
        record.raw,
        points=record.points,
        penalty=record.penalty,
        late_s=record.late_s,
        facts=msgspec.to_builtins(facts),
    )

"""The record of a graded submission beside its results.json: for staff, not for students."""

from __future__ import annotations

from typing import Literal

import msgspec

from labctl.courses.grading.claims import AccuracyComparison
from labctl.courses.grading.flags import Flag
from labctl.courses.grading.results import GradeResults, lateness_note, subtract_penalty
from labctl.courses.records.free_days import FreeDays
from labctl.decoding import decode_json
from labctl.model import Value

VERSION = 1
FILE, RESULTS, OUTPUT = "grade.json", "results.json", "output.txt"
# What was printed in containers that had staff's tests; students never get it.
TESTS_OUTPUT = "tests.txt"
FEEDBACK = "feedback.html"
# `failed`: the submission's program did not produce predictions. `error`: the grading failed.
Outcome = Literal["graded", "failed", "error"]
WORDS = {
    "exit": "its program ended with {code}",
    "time": "its program did not end in time",
    "memory": "its program needed more memory than its limit",
    "large": "its program wrote more output than is allowed",
    "none": "its program wrote no predictions",
}


class GradeRecord(Value, frozen=True):
    """The grade of one submission. `key` is the hash of everything that the grade depends on.

    `raw` is the grader's result, before the penalty; `score` is what counts. `message` describes
    an error or failure. `has_output` is True if the submission's program printed anything.
    `image` is the reference of the grading image, and `image_content` a hash of it, "" if unknown.
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
    free_days: FreeDays = FreeDays()
    raw: GradeResults | None = None
    score: float | None = None
    comparison: AccuracyComparison = AccuracyComparison()
    flags: tuple[Flag, ...] = ()
    message: str = msgspec.field(default="", name="told")
    has_output: bool = msgspec.field(default=False, name="said")
    seconds: float = 0.0
    image: str = ""
    image_content: str = ""
    at: float = 0.0
    version: int = VERSION


class GradeStamp(Value, frozen=True, omit_defaults=True):
    """What labctl adds to results.json, below `labctl` in its `extra_data`.

    `penalty` is in percent of the assignment's `points`, and `counts` is the score less the
    penalty. `submission` is its number.
    """

    points: float
    penalty: int
    late_s: int
    counts: float
    submission: int
    received: str
    bundle_sha256: str
    claim: AccuracyComparison
    # Left out if none was used, as by versions without free days.
    free_days: FreeDays | None = None


def encode(record: GradeRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes) -> GradeRecord | None:
    """Parse a record; None if it is not one of this version, so that grading repeats it."""
    try:
        record = decode_json(data, GradeRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return record if record.version == VERSION else None


def describe_outcome(outcome: str, code: int) -> str:
    """Describe how a submission's program ended."""
    return WORDS.get(outcome, "its program ended in an unknown way").format(code=code)


def build_results(record: GradeRecord) -> GradeResults:
    """Return the results.json of a graded submission, with a note on the late penalty.

    The score stays as graded: the penalty is deducted once, when grades are exported.
    """
    raw = record.raw
    assert raw is not None
    stamp = GradeStamp(
        points=record.points,
        penalty=record.penalty,
        late_s=record.late_s,
        counts=subtract_penalty(raw.score, record.points, record.penalty),
        submission=record.number,
        received=record.received,
        bundle_sha256=record.bundle_sha256,
        claim=record.comparison,
        free_days=record.free_days if record.free_days.used else None,
    )
    note = lateness_note(
        raw.score, record.points, record.penalty, record.late_s, record.free_days.text
    )
    return msgspec.structs.replace(
        raw,
        output="\n".join(filter(None, [raw.output, note])),
        extra_data={**raw.extra_data, "labctl": msgspec.to_builtins(stamp)},
    )

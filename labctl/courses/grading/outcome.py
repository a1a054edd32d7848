"""What a result of the grading server means: a grade, a failed submission, or a failed grading."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.courses.grading.claims import AccuracyComparison
from labctl.courses.grading.record import GradeRecord, Outcome, describe_outcome
from labctl.courses.grading.results import (
    GradeResults,
    build_failed_results,
    clean_text,
    parse_results,
)
from labctl.model import Value
from labctl.wire.sandbox import GradedJobRecord, ProgramResult

MOST_LINE_CHARS = 300
# Outcomes whose cause a program prints last; one that is stopped prints its progress.
WITH_CAUSE = ("exit", "none")


class JobOutcome(Value, frozen=True):
    """The outcome of one submission: `raw` is None without a grade, and `message` says why."""

    state: Outcome
    raw: GradeResults | None = None
    message: str = ""


def read_outcome(result: GradedJobRecord, points: float) -> JobOutcome:
    """Return what a result of the grading server means."""
    predict, judged = result.predict, result.grade
    if predict.outcome != "ok":
        reason = describe_outcome(predict.outcome, predict.code)
        return make_failure(reason, _add_cause(reason, predict))
    if judged is None:
        return JobOutcome(state="error", message="staff's grader was not run")
    if judged.outcome != "ok":
        reason = f"staff's grader: {describe_outcome(judged.outcome, judged.code)}"
        output = judged.said[-1500:]
        return JobOutcome(state="error", message=f"{_add_cause(reason, judged)}\n{output}".strip())
    try:
        return JobOutcome(state="graded", raw=parse_results(result.results or "", points))
    except ValueError as error:
        return JobOutcome(state="error", message=f"staff's grader: {error}")


def read_single_outcome(result: GradedJobRecord, points: float) -> JobOutcome:
    """Return what a result means whose student's code and tests ran in one container.

    There, nobody can tell whose fault a failure is: it gives no points.
    """
    program = result.predict
    if program.outcome != "ok":
        reason = describe_outcome(program.outcome, program.code)
        return make_failure(reason, _add_cause(reason, program))
    try:
        return JobOutcome(state="graded", raw=parse_results(result.results or "", points))
    except ValueError as error:
        return make_failure("its results cannot be used", f"its results: {error}")


def make_failure(reason: str, message: str) -> JobOutcome:
    """Return the outcome of a failed submission. Its student reads only the reason."""
    raw = build_failed_results(f"{reason}, so nothing could be graded")
    return JobOutcome(state="failed", raw=raw, message=message)


def _add_cause(reason: str, program: ProgramResult) -> str:
    """Add the last line that the program printed, which of a traceback names the error."""
    lines = program.said.strip().splitlines()
    if not lines or program.outcome not in WITH_CAUSE:
        return reason
    return f"{reason}: {clean_text(lines[-1].strip()[:MOST_LINE_CHARS])}"


def find_common_failure(records: Sequence[GradeRecord]) -> str:
    """Return how all of these submissions failed; "" if not all did, or for different reasons.

    Two failures are alike if they end in the same way and with the same kind of error.
    """
    if len(records) < 2 or any(record.outcome != "failed" for record in records):
        return ""
    kinds = {tuple(record.message.split(":")[:2]) for record in records}
    return records[0].message if len(kinds) == 1 else ""


def withhold_grade(record: GradeRecord, message: str) -> GradeRecord:
    """Return the record without its grade, so that the next grading runs the submission again."""
    return msgspec.structs.replace(
        record,
        outcome="error",
        raw=None,
        score=None,
        comparison=AccuracyComparison(),
        message=message,
    )

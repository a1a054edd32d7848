"""The grade of a submission from the results of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.config.course_schema import GradeConfig
from labctl.courses.grading.outcome import (
    JobOutcome,
    make_failure,
    read_outcome,
    read_single_outcome,
)
from labctl.courses.grading.parts import GradedPart, scale_metric
from labctl.courses.grading.record import Outcome
from labctl.courses.grading.results import (
    DEFAULT_VISIBILITY,
    MOST_OUTPUT,
    GradeResults,
    GraderTest,
    clean_text,
    is_shown,
    parse_number,
)
from labctl.model import Value
from labctl.wire.sandbox import GradedJobRecord

# characters of the output of all programs beside tests
MOST_PRIVATE = 500_000
# Ends of the tests that a submission's outputs may cause.
BY_OUTPUTS = ("time", "memory", "large")
# What the points of tests may differ from the markers, by rounding.
TOLERANCE = 1e-3


class PartResult(Value, frozen=True):
    """What the grading server returned for one part."""

    part: GradedPart
    result: GradedJobRecord


class ProgramOutput(Value, frozen=True):
    """What programs printed: `printed` is what its student may read, `private` only staff."""

    printed: str = ""
    private: str = ""


def read_output(results: Sequence[PartResult]) -> ProgramOutput:
    """Return what the programs printed. Beside staff's tests it may have their text."""
    printed, private = "", []
    for one in results:
        if one.part.kind == "grader":
            printed = one.result.predict.said
            continue
        programs = [one.result.predict, *filter(None, [one.result.grade])]
        private += [f"{one.part.title}:", *(program.said.strip() for program in programs)]
    # Staff read it in a terminal.
    return ProgramOutput(printed=printed, private=clean_text("\n".join(private), MOST_PRIVATE))


def read_results(results: Sequence[PartResult], config: GradeConfig) -> JobOutcome:
    """Return the outcome of all parts: a part whose program failed gives no points."""
    outcomes = [_read_part(one.part, one.result, config) for one in results]
    for outcome in outcomes:
        if outcome.raw is None:
            return outcome
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    state: Outcome = "failed" if failed else "graded"
    raws = [outcome.raw for outcome in outcomes if outcome.raw is not None]
    return JobOutcome(
        state=state, raw=_merge(raws), message="\n".join(outcome.message for outcome in failed)
    )


def _read_part(part: GradedPart, result: GradedJobRecord, config: GradeConfig) -> JobOutcome:
    if part.kind in ("public", "autograder"):
        outcome = read_single_outcome(result, part.points)
        if part.kind == "public" and outcome.raw is not None:
            # Unlike an autograder, public tests give no bonus.
            score = min(outcome.raw.score, part.points)
            raw = msgspec.structs.replace(outcome.raw, score=score)
            outcome = msgspec.structs.replace(outcome, raw=raw)
        return _add_title(part, outcome)
    outcome = _read_two_programs(part, result)
    if outcome.state != "graded" or outcome.raw is None:
        return _add_title(part, outcome)
    if part.kind == "hidden":
        return _check_tests(part, outcome.raw)
    return _apply_metric(part, outcome.raw, config)


def _read_two_programs(part: GradedPart, result: GradedJobRecord) -> JobOutcome:
    """Read the outcome of a part with a grading command. One submission must not stop a release."""
    judged = result.grade
    if part.kind == "hidden" and judged is not None and judged.outcome in BY_OUTPUTS:
        reason = "what its code returned made the tests exceed a limit"
        return make_failure(reason, f"{reason} ({judged.outcome})")
    return read_outcome(result, part.points)


def _add_title(part: GradedPart, outcome: JobOutcome) -> JobOutcome:
    """Name the part in a message, at its end: failures are compared by how messages begin."""
    if not part.title or not outcome.message:
        return outcome
    raw = outcome.raw
    if raw is not None:
        raw = msgspec.structs.replace(raw, output=f"{part.title}: {raw.output}")
    first, *lines = outcome.message.splitlines()
    message = "\n".join([f"{first} ({part.title})", *lines])
    return msgspec.structs.replace(outcome, raw=raw, message=message)


def _check_tests(part: GradedPart, raw: GradeResults) -> JobOutcome:
    total = sum(test.max_score or 0.0 for test in raw.tests)
    if abs(total - part.points) > TOLERANCE:
        message = f"the hidden tests gave {total:g} points, but their markers {part.points:g}"
        return JobOutcome(state="error", message=f"{message}: is a test left out or deselected?")
    return JobOutcome(state="graded", raw=raw)


def _apply_metric(part: GradedPart, raw: GradeResults, config: GradeConfig) -> JobOutcome:
    """Replace the grader's score by the points of its metric, if course.yaml names one."""
    name = config.metric_name
    if not name:
        return JobOutcome(state="graded", raw=raw)
    value = parse_number(raw.extra_data.get(name))
    if value is None:
        message = f"staff's grader: results.json has no number {name} in extra_data"
        return JobOutcome(state="error", message=message)
    earned = scale_metric(config.scale or {0.0: 0.0, 1.0: part.points}, value)
    text = f"{name} {value:.4g}: {earned:g} of {part.points:g} points"
    test = GraderTest(name=name, score=earned, max_score=part.points, output=f"{name} {value:.4g}")
    output = "\n".join(filter(None, [raw.output, text]))
    scored = msgspec.structs.replace(raw, score=earned, tests=(test,), output=output)
    return JobOutcome(state="graded", raw=scored)


def _merge(raws: Sequence[GradeResults]) -> GradeResults:
    """Merge the results of all parts. What is not for students hides the text of all."""
    if len(raws) == 1:
        return raws[0]
    extra = {key: value for raw in reversed(raws) for key, value in raw.extra_data.items()}
    output = "\n".join(filter(None, [raw.output for raw in raws]))
    private = [raw.visibility for raw in raws if not is_shown(raw.visibility, is_closed=True)]
    return GradeResults(
        score=round(sum(raw.score for raw in raws), 4),
        output=clean_text(output, MOST_OUTPUT),
        tests=tuple(test for raw in raws for test in raw.tests),
        visibility=private[0] if private else DEFAULT_VISIBILITY,
        extra_data=extra,
    )

"""results.json in the format of Gradescope's autograder. It is checked: a grader may be wrong."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value
from labctl.text import duration_text

MOST_BYTES = 1024 * 1024
MOST_TESTS = 500
MOST_OUTPUT = 20_000
# A grader may give bonus points, up to this multiple of the assignment's points.
MOST_BONUS = 2.0
# When a student may see a test, or the results' text: never, once the assignment is closed, or in
# released feedback. Earlier versions and other graders may have written nothing.
AFTER_CLOSING = "after_due_date"
DEFAULT_VISIBILITY = "after_published"
SHOWN = ("", DEFAULT_VISIBILITY, "visible")
_EMPTY = msgspec.Raw(b'""')
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class GraderTest(Value, frozen=True):
    """One line of the results. `visibility` is Gradescope's: hidden, after_published, ..."""

    name: str = ""
    score: float | None = None
    max_score: float | None = None
    output: str = ""
    status: str = ""
    number: str = ""
    visibility: str = ""
    tags: tuple[str, ...] = ()


class GradeResults(Value, frozen=True):
    """A whole results.json; `score` is in points. `extra_data` is for machines."""

    score: float
    output: str = ""
    tests: tuple[GraderTest, ...] = ()
    visibility: str = DEFAULT_VISIBILITY
    stdout_visibility: str = "hidden"
    execution_time: float = 0.0
    extra_data: dict[str, Any] = msgspec.field(default_factory=dict)


class LooseTest(msgspec.Struct):
    """A test as graders write it: a value of another type than expected is not refused."""

    score: object = None
    name: msgspec.Raw = _EMPTY
    max_score: object = None
    output: msgspec.Raw = _EMPTY
    status: msgspec.Raw = _EMPTY
    number: msgspec.Raw = _EMPTY
    visibility: msgspec.Raw = _EMPTY
    tags: msgspec.Raw = msgspec.Raw(b"[]")


class LooseResults(msgspec.Struct):
    """results.json as graders and people write it. Its texts stay raw: any encoding."""

    score: float | None = None
    output: msgspec.Raw = _EMPTY
    visibility: msgspec.Raw = _EMPTY
    tests: list[LooseTest] = msgspec.field(default_factory=list)
    extra_data: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def total(self) -> float | None:
        """The score, or without one the sum of the tests' scores; None if there are none."""
        if self.score is not None:
            return self.score
        scores = [parse_number(test.score) for test in self.tests]
        numbers = [score for score in scores if score is not None]
        return sum(numbers) if numbers else None

    @property
    def output_text(self) -> str:
        """The output; "" if it is not a text, which does not invalidate the score."""
        output = _decode_loosely(self.output)
        return output if isinstance(output, str) else ""


# Other graders write numbers as strings.
_LOOSE_RESULTS = msgspec.json.Decoder(LooseResults, strict=False)


def decode_results(data: bytes) -> LooseResults:
    """Decode any results.json: labctl's, another grader's, or one edited by hand.

    Raises ValueError if it has another structure, RecursionError if it is nested too deeply.
    """
    return _LOOSE_RESULTS.decode(data)


def _decode_loosely(raw: msgspec.Raw) -> object:
    """Decode a value of any type and encoding."""
    value: object = msgspec.json.decode(bytes(raw).decode(errors="replace"))
    return value


def clean_text(text: str, most: int = MOST_OUTPUT) -> str:
    """Return untrusted text without control characters, cut at `most` characters."""
    plain = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
    return plain if len(plain) <= most else plain[:most] + "\n[cut]"


def parse_results(text: str, points: float) -> GradeResults:
    """Parse and check a grader's results; ValueError says what is wrong with them."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"results.json is larger than {MOST_BYTES >> 20} MiB")
    try:
        loose = decode_results(text.encode("utf-8", "replace"))
        extra_data = decode_json(loose.extra_data, dict[str, Any])
        visibility = _parse_visibility(loose.visibility)
        tests = tuple(_parse_test(row, visibility) for row in loose.tests[:MOST_TESTS])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"results.json cannot be read: {error}") from None
    if len(loose.tests) > MOST_TESTS:
        raise ValueError(f"results.json has {len(loose.tests)} tests; at most {MOST_TESTS} count")
    score = loose.total
    if score is None:
        raise ValueError("results.json has neither a score nor tests with scores")
    if not math.isfinite(score) or not 0 <= score <= MOST_BONUS * points:
        raise ValueError(f"results.json has the score {score:g}, out of {points:g} points")
    output = clean_text(loose.output_text)
    extra = {key: value for key, value in extra_data.items() if key != "labctl"}
    return GradeResults(
        score=score,
        output=output,
        tests=tests,
        visibility=visibility or DEFAULT_VISIBILITY,
        extra_data=extra,
    )


def is_shown(visibility: str, *, is_closed: bool) -> bool:
    """Whether released feedback shows something of this visibility; an unknown one is hidden."""
    return visibility in SHOWN or (visibility == AFTER_CLOSING and is_closed)


def select_shown(results: GradeResults, *, is_closed: bool) -> GradeResults:
    """Return what a student may see of results. `is_closed`: nobody can submit any more."""
    tests = [test for test in results.tests if is_shown(test.visibility, is_closed=is_closed)]
    has_output = is_shown(results.visibility, is_closed=is_closed)
    return msgspec.structs.replace(
        results, tests=tuple(tests), output=results.output if has_output else ""
    )


def _parse_visibility(raw: msgspec.Raw) -> str:
    return "" if bytes(raw) == b"null" else _clean_raw(raw, 20)


def _parse_test(test: LooseTest, visibility: str) -> GraderTest:
    tags = _decode_loosely(test.tags)
    return GraderTest(
        name=_clean_raw(test.name, 200),
        score=parse_number(test.score),
        max_score=parse_number(test.max_score),
        output=_clean_raw(test.output, MOST_OUTPUT),
        status=_clean_raw(test.status, 20),
        number=_clean_raw(test.number, 20),
        visibility=_parse_visibility(test.visibility) or visibility,
        tags=tuple(clean_text(str(tag), 50) for tag in tags[:20]) if isinstance(tags, list) else (),
    )


def _clean_raw(raw: msgspec.Raw, most: int) -> str:
    return clean_text(str(_decode_loosely(raw)), most)


def parse_number(value: object) -> float | None:
    """Return a finite number; None for any other value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def build_failed_results(what: str) -> GradeResults:
    """Return results without points, saying why the submission's program failed."""
    return GradeResults(score=0.0, output=what)


def subtract_penalty(score: float, points: float, penalty: int) -> float:
    """Return the score less `penalty` percent of the assignment's points, at least 0."""
    return round(max(0.0, score - points * penalty / 100), 4)


def lateness_note(
    score: float, points: float, penalty: int, late_s: int, free_days: str = ""
) -> str:
    """Return the last line of a late submission's feedback; "" without a penalty and free days."""
    if not penalty and not free_days:
        return ""
    counts = subtract_penalty(score, points, penalty)
    return _format_lateness_note(duration_text(late_s), counts, penalty, free_days)


def _format_lateness_note(late: str, counts: float, penalty: int, free_days: str) -> str:
    reasons = [f"{late} late", free_days, f"-{penalty}%" if penalty else ""]
    return f"{', '.join(filter(None, reasons))}: final score {counts:g}"


def without_lateness_note(
    output: str, *, score: float, points: float, penalty: int, late_s: int, free_days: str = ""
) -> str:
    """Remove the note of `lateness_note` from the end of a stored output.

    It also removes the note in the wordings of earlier versions.
    """
    if not penalty and not free_days:
        return output.rstrip()
    lateness = (score, points, penalty, late_s, free_days)
    for note in (lateness_note(*lateness), *list_earlier_lateness_notes(*lateness)):
        if output.endswith(note):
            return output.removesuffix(note).rstrip()
    return output.rstrip()


def list_earlier_lateness_notes(
    score: float, points: float, penalty: int, late_s: int, free_days: str = ""
) -> list[str]:
    """Return the note in the wordings that earlier versions stored, the newest first."""
    counts = subtract_penalty(score, points, penalty)
    days, seconds = divmod(late_s, 86_400)
    hours, minutes = divmod(seconds // 60, 60)
    parts = [f"{days} d"] * bool(days) + [f"{hours} h"] * bool(hours)
    late = " ".join([*parts, *[f"{minutes} min"] * (not days)])
    in_seconds = f"{late_s} s" if 0 < late_s < 60 else late
    return [
        _format_lateness_note(in_seconds, counts, penalty, free_days),
        f"{penalty}% of the points off, handed in {late} late: {counts:g} count",
    ]


def encode(results: GradeResults) -> bytes:
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"

"""results.json as Gradescope's autograder writes it, read with care: a grader may be wrong."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from labctl.model import Value

MOST_BYTES = 1024 * 1024
MOST_TESTS = 500
MOST_OUTPUT = 20_000
# A grader may give more than all of the points, up to so many times as much.
MOST_BONUS = 2.0
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Test(Value, frozen=True):
    """One line of the results. `visibility` is Gradescope's: hidden, after_published, ..."""

    name: str = ""
    score: float | None = None
    max_score: float | None = None
    output: str = ""
    status: str = ""
    number: str = ""
    visibility: str = ""
    tags: tuple[str, ...] = ()


class Results(Value, frozen=True):
    """A whole results.json; `score` is in points. `extra_data` is for machines."""

    score: float
    output: str = ""
    tests: tuple[Test, ...] = ()
    visibility: str = "after_published"
    stdout_visibility: str = "hidden"
    execution_time: float = 0.0
    extra_data: dict[str, Any] = msgspec.field(default_factory=dict)


class _Loose(msgspec.Struct):
    """As graders write it: the score may be left to the tests."""

    score: float | None = None
    output: str = ""
    tests: list[dict[str, Any]] = msgspec.field(default_factory=list)
    extra_data: dict[str, Any] = msgspec.field(default_factory=dict)


def cleaned(text: str, most: int = MOST_OUTPUT) -> str:
    """A stranger's text without what a terminal or a page would obey; cut at `most`."""
    plain = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
    return plain if len(plain) <= most else plain[:most] + "\n[cut]"


def parse_results(text: str, points: float) -> Results:
    """The results that a grader wrote; ValueError with what is wrong with them."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"results.json is larger than {MOST_BYTES >> 20} MiB")
    try:
        found = msgspec.json.decode(text.encode("utf-8", "replace"), type=_Loose, strict=False)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"results.json cannot be read: {error}") from None
    if len(found.tests) > MOST_TESTS:
        raise ValueError(f"results.json has {len(found.tests)} tests; at most {MOST_TESTS} count")
    tests = tuple(_test(one) for one in found.tests)
    scores = [one.score for one in tests if one.score is not None]
    if found.score is None and not scores:
        raise ValueError("results.json has neither a score nor tests with scores")
    score = sum(scores) if found.score is None else found.score
    if not math.isfinite(score) or not 0 <= score <= MOST_BONUS * points:
        raise ValueError(f"results.json has the score {score:g}, out of {points:g} points")
    extra = {key: value for key, value in found.extra_data.items() if key != "labctl"}
    return Results(score=score, output=cleaned(found.output), tests=tests, extra_data=extra)


def _test(row: dict[str, Any]) -> Test:
    def number(key: str) -> float | None:
        value = row.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value) if math.isfinite(value) else None

    tags = row.get("tags")
    return Test(
        name=cleaned(str(row.get("name", "")), 200),
        score=number("score"),
        max_score=number("max_score"),
        output=cleaned(str(row.get("output", ""))),
        status=cleaned(str(row.get("status", "")), 20),
        number=cleaned(str(row.get("number", "")), 20),
        visibility=cleaned(str(row.get("visibility", "")), 20),
        tags=tuple(cleaned(str(tag), 50) for tag in tags[:20]) if isinstance(tags, list) else (),
    )


def failed(what: str) -> Results:
    """No points, and why: the submission's own program did not get to an answer."""
    return Results(score=0.0, output=what)


def after_penalty(score: float, points: float, penalty: int) -> float:
    """The score once `penalty` percent of the assignment's points were taken off; never below 0."""
    return round(max(0.0, score - points * penalty / 100), 4)


def stamped(
    raw: Results, *, points: float, penalty: int, late_s: int, facts: dict[str, Any]
) -> Results:
    """As results.json is kept: the grader's own score, and beside it what lateness comes to.

    The score itself stays as graded: whoever writes grades back takes the penalty off, once.
    """
    counts = after_penalty(raw.score, points, penalty)
    said = lateness_note(raw.score, points, penalty, late_s)
    output = "\n".join(filter(None, [raw.output, said]))
    own = {"points": points, "penalty": penalty, "late_s": late_s, "counts": counts, **facts}
    return msgspec.structs.replace(raw, output=output, extra_data={**raw.extra_data, "labctl": own})


def lateness_note(score: float, points: float, penalty: int, late_s: int) -> str:
    """The last line of what a late submission's student reads; "" without a penalty."""
    if not penalty:
        return ""
    counts = after_penalty(score, points, penalty)
    return f"{penalty}% of the points off, handed in {late_text(late_s)} late: {counts:g} count"


def late_text(late_s: int) -> str:
    days, rest = divmod(late_s, 86_400)
    hours, minutes = divmod(rest // 60, 60)
    parts = [f"{days} d"] * bool(days) + [f"{hours} h"] * bool(hours)
    return " ".join([*parts, *[f"{minutes} min"] * (not days)])


def encode(results: Results) -> bytes:
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"

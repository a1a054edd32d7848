"""Grades as grading left them: Gradescope's results.json, with the receiver's stamp beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from labctl.courses.student import Student
from labctl.model import Value

RESULTS = "results.json"
MOST_BYTES = 4 * 1024**2


class _Test(Value, frozen=True):
    score: float | None = None


class _Results(Value, frozen=True):
    """Gradescope's form: where there is no `score`, the tests' sum counts."""

    score: float | None = None
    tests: tuple[_Test, ...] = ()
    extra_data: dict[str, object] = msgspec.field(default_factory=dict)


class Stamp(Value, frozen=True):
    """What the receiver stamped on the submission that was graded. `penalty` in percent."""

    number: int = 0
    received: str = ""
    late_s: int = 0
    penalty: int = 0


class Grade(Value, frozen=True):
    """One student's grade. `score` is as graded, None for none; `problem` says why.

    `final` is the score less the penalty: percent of the assignment's points, never below 0.
    """

    student: str
    score: float | None
    points: float
    stamp: Stamp = Stamp()
    team: str = ""
    released: bool = False
    problem: str = ""

    @property
    def off(self) -> float:
        return self.points * self.stamp.penalty / 100

    @property
    def final(self) -> float | None:
        return None if self.score is None else max(0.0, self.score - self.off)


def read_grades(
    grades: Path,
    assignment: str,
    points: float,
    students: Iterable[Student],
    stamps: Mapping[str, Stamp],
    released: frozenset[str] = frozenset(),
) -> list[Grade]:
    """The grade of each student: their own, else their team's. `stamps` by student or team."""
    found = []
    for one in students:
        owner = next(
            (
                name
                for name in (one.id, one.team)
                if name and _file(grades, assignment, name).is_file()
            ),
            "",
        )
        score, problem = _score(_file(grades, assignment, owner)) if owner else (None, "")
        stamp = stamps.get(owner) or stamps.get(one.id) or stamps.get(one.team) or Stamp()
        if not owner:
            problem = "not graded yet" if stamp.number else "nothing was handed in"
        found.append(
            Grade(
                student=one.id,
                score=score,
                points=points,
                stamp=stamp,
                team=one.team,
                released=one.id in released,
                problem=problem,
            )
        )
    return found


def _file(grades: Path, assignment: str, name: str) -> Path:
    return grades / assignment / name / RESULTS


def _score(file: Path) -> tuple[float | None, str]:
    try:
        if file.stat().st_size > MOST_BYTES:
            return None, "its results.json is too large"
        results = msgspec.json.decode(file.read_bytes(), type=_Results)
    except (OSError, msgspec.MsgspecError):
        return None, "its results.json cannot be read"
    scores = [one.score for one in results.tests if one.score is not None]
    score = results.score if results.score is not None else (sum(scores) if scores else None)
    if score is None:
        return None, "its results.json has no score"
    if not math.isfinite(score):
        return None, "its score is no number"
    return score, ""


def points_text(value: float | None) -> str:
    """87.5, 90, and "" for no grade: at most three places, a point, no thousands."""
    if value is None:
        return ""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return text or "0"

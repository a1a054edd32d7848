"""Grades as grading left them: Gradescope's results.json, with the receiver's stamp beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from labctl.courses.records.student import Student
from labctl.model import Value

RESULTS = "results.json"
MOST_BYTES = 4 * 1024**2


class _Test(Value, frozen=True):
    score: float | None = None


class Stamp(Value, frozen=True):
    """What the receiver stamped on the submission that was graded. `penalty` in percent."""

    number: int = msgspec.field(default=0, name="submission")
    received: str = ""
    late_s: int = 0
    penalty: int = 0


NOTHING: tuple[None, None, str] = (None, None, "")


class _Extra(Value, frozen=True):
    labctl: Stamp | None = None


class _Results(Value, frozen=True):
    """Gradescope's form: where there is no `score`, the tests' sum counts."""

    score: float | None = None
    tests: tuple[_Test, ...] = ()
    extra_data: _Extra = _Extra()


class Grade(Value, frozen=True):
    """One student's grade. `score` is as graded, None for none; `problem` says why.

    `final` is the score less the penalty: percent of the assignment's points, never below 0.
    `owner` is whose file it was read from. A released grade is the one that was released:
    `unreleased` is what there is by now, where that differs, and `change` says why.
    """

    student: str
    score: float | None
    points: float
    stamp: Stamp = Stamp()
    team: str = ""
    released: bool = False
    problem: str = ""
    owner: str = ""
    corrected: bool = False
    unreleased: Grade | None = None
    change: str = ""

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
    seats: Mapping[str, str] | None = None,
) -> list[Grade]:
    """The grade of each student: their own, else their team's.

    `stamps`, by student or team, are of what was handed in: they count where grading wrote none.
    `seats` are the seats' names by student, where those of the roster are not meant.
    """
    found = []
    for one in students:
        seat = one.seat if seats is None else seats.get(one.id, one.id)
        owner = next(
            (name for name in (one.id, seat) if _file(grades, assignment, name).is_file()), ""
        )
        score, graded, problem = _read(_file(grades, assignment, owner)) if owner else NOTHING
        stamp = graded or stamps.get(one.id) or stamps.get(seat) or Stamp()
        if not owner:
            problem = "not graded yet" if stamp.number else "nothing was handed in"
        found.append(
            Grade(
                student=one.id,
                score=score,
                points=points,
                stamp=stamp,
                team="" if seat == one.id else seat,
                released=one.id in released,
                problem=problem,
                owner=owner,
            )
        )
    return found


def _file(grades: Path, assignment: str, name: str) -> Path:
    return grades / assignment / name / RESULTS


def _read(file: Path) -> tuple[float | None, Stamp | None, str]:
    """(score, the stamp that grading wrote beside it, what is wrong)."""
    try:
        if file.stat().st_size > MOST_BYTES:
            return None, None, "its results.json is too large"
        results = msgspec.json.decode(file.read_bytes(), type=_Results)
    except (OSError, msgspec.MsgspecError):
        return None, None, "its results.json cannot be read"
    stamp = results.extra_data.labctl
    scores = [one.score for one in results.tests if one.score is not None]
    score = results.score if results.score is not None else (sum(scores) if scores else None)
    if score is None:
        return None, stamp, "its results.json has no score"
    if not math.isfinite(score):
        return None, stamp, "its score is no number"
    return score, stamp, ""


def points_text(value: float | None) -> str:
    """87.5, 90, and "" for no grade: at most three places, a point, no thousands."""
    if value is None:
        return ""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return text or "0"

"""Statistics of an assignment's grades: their distribution, and the hardest parts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from labctl.courses.grading.results import GradeResults
from labctl.courses.records.gradebook import Grade
from labctl.model import Value

BINS = 10


class ScoreBin(Value, frozen=True):
    """The number of students with a score from `low` on and below `high`; the last includes it."""

    low: float
    high: float
    students: int


class PartStatistics(Value, frozen=True):
    """A test or an item of the rubric: the mean of `count` scores, and its share of the points."""

    name: str
    kind: str
    mean: float
    points: float
    count: int

    @property
    def share(self) -> float:
        return self.mean / self.points


class GradeStatistics(Value, frozen=True):
    """The grades of an assignment, penalties subtracted. `parts` begin with the hardest.

    The numbers are None while nothing is graded. `hours` and `usd` are what servers ran and cost
    for the assignment, per student of the course; None if the ledger has none.
    """

    assignment: str
    points: float
    students: int
    graded: int
    excused: int
    mean: float | None = None
    median: float | None = None
    deviation: float | None = None
    lowest: float | None = None
    highest: float | None = None
    bins: tuple[ScoreBin, ...] = ()
    parts: tuple[PartStatistics, ...] = ()
    hours: float | None = None
    usd: float | None = None


def compute_statistics(
    assignment: str, points: float, grades: Sequence[Grade], results: Iterable[GradeResults]
) -> GradeStatistics:
    """Return the statistics of these grades; `results` are those of the automatic grading."""
    scores = [grade.final for grade in grades if grade.final is not None]
    empty = GradeStatistics(
        assignment=assignment,
        points=points,
        students=len(grades),
        graded=len(scores),
        excused=sum(grade.excused for grade in grades),
        parts=tuple(_list_parts(grades, results)),
    )
    if not scores:
        return empty
    return GradeStatistics(
        assignment=assignment,
        points=points,
        students=empty.students,
        graded=empty.graded,
        excused=empty.excused,
        mean=statistics.fmean(scores),
        median=statistics.median(scores),
        deviation=statistics.pstdev(scores),
        lowest=min(scores),
        highest=max(scores),
        bins=tuple(_count_bins(scores, points)),
        parts=empty.parts,
    )


def _count_bins(scores: Sequence[float], points: float) -> Iterable[ScoreBin]:
    """Yield BINS equal bins from 0 to the points; a score above them is in the last."""
    width = points / BINS
    places = [min(BINS - 1, int(score / width + 1e-9)) for score in scores]
    for place in range(BINS):
        yield ScoreBin(
            low=round(place * width, 3),
            high=round((place + 1) * width, 3),
            students=places.count(place),
        )


def _list_parts(grades: Sequence[Grade], results: Iterable[GradeResults]) -> list[PartStatistics]:
    """Return the tests and the rubric's items that have points, the hardest first."""
    scores: dict[tuple[str, str, float], list[float]] = {}
    for result in results:
        for test in result.tests:
            if test.score is not None and test.max_score and test.max_score > 0:
                scores.setdefault(("test", test.name, test.max_score), []).append(test.score)
    for grade in grades:
        for item in grade.items:
            if item.mark is not None:
                scores.setdefault(("item", item.name, item.points), []).append(item.mark.points)
    parts = [
        PartStatistics(
            name=name, kind=kind, mean=statistics.fmean(each), points=points, count=len(each)
        )
        for (kind, name, points), each in scores.items()
    ]
    return sorted(parts, key=lambda part: part.share)

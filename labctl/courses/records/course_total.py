"""A student's total over the assignments, without the lowest grades that a group drops. Pure.

Points add up, or each group of assignments counts with its weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from labctl.config.course_schema import AssignmentGroup
from labctl.model import Value

# Decimal places of a percentage, as in Canvas.
PERCENT_DIGITS = 2
# Decimal places to which shares of points are compared: a sum of marks is not exact.
SHARE_DIGITS = 9


class CountedGrade(Value, frozen=True):
    """A grade that can count: `final` of the assignment's `points`, the penalty subtracted."""

    assignment: str
    final: float
    points: float

    @property
    def share(self) -> float:
        return round(self.final / self.points, SHARE_DIGITS)


class DroppedGrade(Value, frozen=True):
    """A grade that does not count: one of the `dropped` lowest of the `graded` in its group."""

    assignment: str
    group: str
    dropped: int
    graded: int

    @property
    def reason(self) -> str:
        lowest = "the lowest" if self.dropped == 1 else f"one of the {self.dropped} lowest"
        return f"dropped: {lowest} of {self.graded} in {self.group}"

    @property
    def text(self) -> str:
        return f"{self.assignment} is {self.reason}"


class GroupTotal(Value, frozen=True):
    """The grades of a group that count, `final` of `points`; `weight` is a percent of the total."""

    name: str
    weight: float
    final: float
    points: float

    @property
    def text(self) -> str:
        return f"{self.name} ({self.weight:g}%): {self.final:g} of {self.points:g}"


class CourseTotal(Value, frozen=True):
    """The sum of the grades that count, of `points` in all.

    With weights, `final` is a percentage and `points` is 100; `groups` are those that have grades.
    `missing` are the assignments that count as 0 because nothing was submitted.
    """

    final: float = 0.0
    points: float = 0.0
    dropped: tuple[DroppedGrade, ...] = ()
    missing: tuple[str, ...] = ()
    groups: tuple[GroupTotal, ...] = ()

    @property
    def text(self) -> str:
        if self.groups:
            return f"{self.final:g}%"
        return f"{self.final:g} of {self.points:g} points"

    def find_dropped(self, assignment: str) -> DroppedGrade | None:
        return next((one for one in self.dropped if one.assignment == assignment), None)


def compute_total(
    grades: Iterable[CountedGrade],
    groups: Mapping[str, AssignmentGroup],
    missing: Collection[str] = (),
) -> CourseTotal:
    """Return the total of a student's grades.

    `grades` has none for an excused student, and none for what is not graded yet.
    """
    by_name = {grade.assignment: grade for grade in grades}
    dropped = [
        lowest for name, group in groups.items() for lowest in _find_lowest(name, group, by_name)
    ]
    without = {one.assignment for one in dropped}
    counted = {name: grade for name, grade in by_name.items() if name not in without}
    weighted = [
        _add_up_group(name, group, counted) for name, group in groups.items() if group.weight
    ]
    group_totals = tuple(one for one in weighted if one.points)
    final, points = _add_up(counted.values())
    if group_totals:
        final, points = _weigh(group_totals), 100.0
    return CourseTotal(
        final=final,
        points=points,
        dropped=tuple(dropped),
        missing=tuple(name for name in by_name if name in missing),
        groups=group_totals,
    )


def _add_up(grades: Iterable[CountedGrade]) -> tuple[float, float]:
    grades = list(grades)
    final, points = sum(grade.final for grade in grades), sum(grade.points for grade in grades)
    return round(final, 3), round(points, 3)


def _add_up_group(
    name: str, group: AssignmentGroup, counted: Mapping[str, CountedGrade]
) -> GroupTotal:
    final, points = _add_up(counted[one] for one in group.assignments if one in counted)
    return GroupTotal(name=name, weight=group.weight, final=final, points=points)


def _weigh(groups: Iterable[GroupTotal]) -> float:
    """Return the percentage of groups that have grades; the weights of the others do not count."""
    groups = list(groups)
    weighted = sum(group.weight * group.final / group.points for group in groups)
    return round(100 * weighted / sum(group.weight for group in groups), PERCENT_DIGITS)


def _find_lowest(
    name: str, group: AssignmentGroup, grades: Mapping[str, CountedGrade]
) -> list[DroppedGrade]:
    """Return the grades of a group that do not count; one of them always counts.

    Of equal shares, the one worth more points is dropped, which is better for the student below
    the mean; of equal points, the first in the group.
    """
    own = [grades[one] for one in group.assignments if one in grades]
    ranked = sorted(own, key=lambda grade: (grade.share, -grade.points))
    count = min(group.drop_lowest, len(own) - 1)
    return [
        DroppedGrade(assignment=grade.assignment, group=name, dropped=count, graded=len(own))
        for grade in ranked[: max(0, count)]
    ]

"""The view of a list, read from an address: which rows are shown, and in which order."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar
from urllib.parse import urlencode

from labctl.model import Value
from labctl.web.view import PersonView, SeatView

Item = TypeVar("Item")
SortValue = str | float

# filters of a list: (name in the address, text of the link)
SEAT_MARKS = (
    ("up", "up"),
    ("running", "running"),
    ("idle", "idle"),
    ("budget", "80% spent"),
    ("trouble", "problem"),
)
PERSON_MARKS = (
    ("missing", "not submitted"),
    ("late", "late"),
    ("ungraded", "not graded"),
    ("outdated", "to mark again"),
    ("excused", "excused"),
)
SEAT_COLUMNS = ("name", "state", "gpu", "run", "idle", "cost", "ends")
PERSON_COLUMNS = ("name", "received", "late", "score")
# columns that are sorted with the largest value first
LARGEST_FIRST = ("gpu", "idle", "cost", "received", "late", "score")


class ListView(Value, frozen=True):
    """A view of a list: `show` is a filter; `sort` is a column, with `-` in descending order.

    An empty `show` shows everything, an empty `sort` keeps the order of the roster.
    """

    show: str = ""
    sort: str = ""

    @classmethod
    def read(
        cls, show: str, sort: str, marks: Collection[str], columns: Collection[str]
    ) -> ListView:
        """Create a view of values from an address; unknown filters and columns count as ""."""
        is_column = sort.removeprefix("-") in columns
        return cls(show=show if show in marks else "", sort=sort if is_column else "")

    @property
    def column(self) -> str:
        return self.sort.removeprefix("-")

    @property
    def is_descending(self) -> bool:
        return self.sort.startswith("-")

    @property
    def query(self) -> str:
        """The query of the view's address, `?show=idle&sort=-cost`; "" for the default view."""
        pairs = [(name, value) for name, value in self.as_pairs().items() if value]
        return f"?{urlencode(pairs)}" if pairs else ""

    def as_pairs(self) -> dict[str, str]:
        return {"show": self.show, "sort": self.sort}

    def select(self, mark: str) -> ListView:
        return ListView(show=mark, sort=self.sort)

    def toggle(self, column: str) -> ListView:
        """Return the view after a click on a column: sorted, then reversed, then unsorted."""
        first, second = column, f"-{column}"
        if column in LARGEST_FIRST:
            first, second = second, first
        sort = {first: second, second: ""}.get(self.sort, first)
        return ListView(show=self.show, sort=sort)


def arrange(
    items: Iterable[Item],
    view: ListView,
    marks_of: Callable[[Item], Collection[str]],
    columns: Mapping[str, Callable[[Item], SortValue]],
) -> list[Item]:
    """Return the items that a view shows, in its order; equal items keep their order."""
    visible = [item for item in items if not view.show or view.show in marks_of(item)]
    if view.column in columns:
        visible.sort(key=columns[view.column], reverse=view.is_descending)
    return visible


def seat_sort_keys(
    name_of: Callable[[SeatView], str],
) -> dict[str, Callable[[SeatView], SortValue]]:
    return {
        "name": lambda seat: collation_key(name_of(seat)),
        "state": lambda seat: seat.state,
        "gpu": _gpu_percent,
        "run": lambda seat: seat.run.state if seat.run else "~",  # after every state
        "idle": lambda seat: (seat.machine.idle_s if seat.machine else 0) or 0,
        "cost": lambda seat: seat.spent_usd,
        "ends": lambda seat: (seat.machine.deadline_at if seat.machine else 0) or math.inf,
    }


def person_sort_keys(
    assignment: str, name_of: Callable[[PersonView], str]
) -> dict[str, Callable[[PersonView], SortValue]]:
    def received(person: PersonView) -> str:
        submission = person.find_submission(assignment)
        return submission.received if submission else ""

    def late_s(person: PersonView) -> float:
        submission = person.find_submission(assignment)
        return submission.late_s if submission else -1

    def score(person: PersonView) -> float:
        grade = person.grade(assignment)
        return -1 if grade is None or grade.score is None else grade.score

    return {
        "name": lambda person: collation_key(name_of(person)),
        "received": received,
        "late": late_s,
        "score": score,
    }


def person_marks(person: PersonView, assignment: str) -> tuple[str, ...]:
    submission, grade = person.find_submission(assignment), person.grade(assignment)
    is_submitted = submission is not None and submission.accepted
    is_excused = grade is not None and grade.excused
    is_graded = grade is not None and grade.score is not None
    marks = {
        "submitted": is_submitted,
        "missing": not is_submitted and not is_excused,
        "late": submission is not None and submission.accepted and submission.late_s > 0,
        "ungraded": is_submitted and not is_excused and not is_graded,
        "outdated": grade is not None and bool(grade.outdated),
        "excused": is_excused,
    }
    return tuple(name for name, holds in marks.items() if holds)


class SeatCounts(Value, frozen=True):
    """Seats of an assignment. `late` and `graded` are among those that submitted.

    `outdated` have marks for an older submission than the one that counts.
    """

    seats: int
    submitted: int
    late: int
    graded: int
    outdated: int


def count_seats(people: Iterable[PersonView], assignment: str) -> SeatCounts:
    """Count seats, as `labctl course collect` does: a team submits once."""
    seats: dict[str, set[str]] = {}
    for person in people:
        marks = person_marks(person, assignment)
        seats.setdefault(person.team or person.id, set()).update(marks)
    return SeatCounts(
        seats=len(seats),
        submitted=sum("submitted" in marks for marks in seats.values()),
        late=sum("late" in marks for marks in seats.values()),
        graded=sum("submitted" in marks and "ungraded" not in marks for marks in seats.values()),
        outdated=sum("outdated" in marks for marks in seats.values()),
    )


def collation_key(text: str) -> str:
    """Return the sort key of a text, without accents and case."""
    letters = unicodedata.normalize("NFKD", text)
    return "".join(char for char in letters if not unicodedata.combining(char)).casefold()


def _gpu_percent(seat: SeatView) -> float:
    gauge = seat.machine.gauge if seat.machine else None
    return -1 if gauge is None or gauge.gpu_percent is None else gauge.gpu_percent

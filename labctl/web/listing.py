"""Which rows of a list are shown, and in which order: a view, read from an address."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar
from urllib.parse import urlencode

from labctl.model import Value
from labctl.web.view import Person, Seat

Item = TypeVar("Item")
SortValue = str | float

# What a list can be narrowed to, and what the link says.
SEAT_MARKS = (
    ("up", "up"),
    ("running", "running"),
    ("idle", "idle"),
    ("budget", "80 % spent"),
    ("trouble", "trouble"),
)
PERSON_MARKS = (("missing", "missing"), ("late", "late"), ("ungraded", "not graded"))
SEAT_COLUMNS = ("name", "state", "gpu", "run", "idle", "cost", "ends")
PERSON_COLUMNS = ("name", "received", "late", "score")
# Of these the largest comes first where a column is chosen.
LARGEST_FIRST = ("gpu", "idle", "cost", "received", "late", "score")


class ListView(Value, frozen=True):
    """`show` is a mark; `sort` is a column, or `-cost` for the largest cost first.

    An empty `show` shows everything, an empty `sort` keeps the roster's order.
    """

    show: str = ""
    sort: str = ""

    @classmethod
    def read(
        cls, show: str, sort: str, marks: Collection[str], columns: Collection[str]
    ) -> ListView:
        """A view of these words where they are a mark and a column; anything else counts as ""."""
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
        """`?show=idle&sort=-cost`; "" for everything in the roster's order."""
        pairs = [(name, value) for name, value in self.as_pairs().items() if value]
        return f"?{urlencode(pairs)}" if pairs else ""

    def as_pairs(self) -> dict[str, str]:
        return {"show": self.show, "sort": self.sort}

    def select(self, mark: str) -> ListView:
        return ListView(show=mark, sort=self.sort)

    def toggle(self, column: str) -> ListView:
        """By a column, then the other way round, then in the roster's order again."""
        begin, turned = column, f"-{column}"
        if column in LARGEST_FIRST:
            begin, turned = turned, begin
        following = {begin: turned, turned: ""}.get(self.sort, begin)
        return ListView(show=self.show, sort=following)


def arrange(
    items: Iterable[Item],
    view: ListView,
    marks_of: Callable[[Item], Collection[str]],
    columns: Mapping[str, Callable[[Item], SortValue]],
) -> list[Item]:
    """The items that are shown, in order; what is equal stays in the order that it came in."""
    shown = [one for one in items if not view.show or view.show in marks_of(one)]
    if view.column in columns:
        shown.sort(key=columns[view.column], reverse=view.is_descending)
    return shown


def seat_columns(name_of: Callable[[Seat], str]) -> dict[str, Callable[[Seat], SortValue]]:
    return {
        "name": lambda seat: collate(name_of(seat)),
        "state": lambda seat: seat.state,
        "gpu": _gpu_percent,
        "run": lambda seat: seat.run.state if seat.run else "~",  # after every state
        "idle": lambda seat: (seat.machine.idle_s if seat.machine else 0) or 0,
        "cost": lambda seat: seat.spent_usd,
        "ends": lambda seat: (seat.machine.deadline_at if seat.machine else 0) or math.inf,
    }


def person_columns(
    assignment: str, name_of: Callable[[Person], str]
) -> dict[str, Callable[[Person], SortValue]]:
    def received(person: Person) -> str:
        submission = person.handed(assignment)
        return submission.received if submission else ""

    def late_s(person: Person) -> float:
        submission = person.handed(assignment)
        return submission.late_s if submission else -1

    def score(person: Person) -> float:
        grade = person.grade(assignment)
        return -1 if grade is None or grade.score is None else grade.score

    return {
        "name": lambda person: collate(name_of(person)),
        "received": received,
        "late": late_s,
        "score": score,
    }


def person_marks(person: Person, assignment: str) -> tuple[str, ...]:
    submission, grade = person.handed(assignment), person.grade(assignment)
    if submission is None:
        return ("missing",)
    is_graded = grade is not None and grade.score is not None
    marks = {"late": submission.late_s > 0, "ungraded": not is_graded}
    return tuple(name for name, holds in marks.items() if holds)


def collate(text: str) -> str:
    """`text` for sorting: an accent or a capital does not move a name elsewhere."""
    letters = unicodedata.normalize("NFKD", text)
    return "".join(one for one in letters if not unicodedata.combining(one)).casefold()


def _gpu_percent(seat: Seat) -> float:
    gauge = seat.machine.gauge if seat.machine else None
    return -1 if gauge is None or gauge.gpu_percent is None else gauge.gpu_percent

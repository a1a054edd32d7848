"""Free late days: each student has some over the term, spent in the order of due times. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from labctl.model import Value


class FreeDays(Value, frozen=True):
    """The free days that a seat spends in one assignment: `used` of the `total` of the term."""

    used: int = 0
    total: int = 0

    @property
    def text(self) -> str:
        return f"uses {self.used} of {self.total} free days" if self.used else ""


class LateWork(Value, frozen=True):
    """The late days of an assignment by seat. `free_days` are those of the term so far.

    `members` are each seat's students who need the days; an excused student does not.
    """

    assignment: str
    free_days: int
    days: Mapping[str, int]
    members: Mapping[str, tuple[str, ...]]


def spend_free_days(works: Iterable[LateWork]) -> dict[tuple[str, str], FreeDays]:
    """Return (assignment, seat) -> the free days that it spends.

    `works` are in the order of their due times. A seat spends as many days as it is late, and as
    each of its students still has: a team has one grade. Each of them spends these days.
    """
    spent: dict[str, int] = {}
    free_days = {}
    for work in works:
        for seat, days in work.days.items():
            members = work.members.get(seat, ())
            left = min((work.free_days - spent.get(one, 0) for one in members), default=0)
            used = max(0, min(days, left))
            for one in members:
                spent[one] = spent.get(one, 0) + used
            free_days[work.assignment, seat] = FreeDays(used=used, total=work.free_days)
    return free_days

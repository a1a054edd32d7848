"""When a course's servers are wanted: its class hours, by the clocks of their own zones. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

from labctl.config.course_schema import DAYS, ClassHours, Term
from labctl.model import Value

Phase = Literal["prewarm", "class", "off"]


class Lesson(Value, frozen=True):
    """One meeting of the class, in Unix seconds; servers are wanted from `warm` to `ends`."""

    warm: float
    begins: float
    ends: float


def lessons(hours: Iterable[ClassHours], term: Term | None, around: float) -> list[Lesson]:
    """The meetings of the two days before and the eight days after `around`, in their order.

    An hour that clocks skip begins when they go on; one that they show twice is the first.
    """
    found = []
    for one in hours:
        zone = ZoneInfo(one.zone)
        today = datetime.fromtimestamp(around, zone).date()
        for shift in range(-2, 9):
            day = today + timedelta(days=shift)
            if DAYS[day.weekday()] in one.days and _in_term(day, term):
                begins, ends = (_at(day, second, zone) for second in (one.begins, one.ends))
                found.append(Lesson(warm=begins - one.prewarm, begins=begins, ends=ends))
    return sorted(found, key=lambda one: (one.warm, one.ends))


def phase(
    hours: Iterable[ClassHours], term: Term | None, now: float
) -> tuple[Phase, Lesson | None]:
    """What `now` is, and the meeting that makes it so: the longest one of several."""
    current = [one for one in lessons(hours, term, now) if one.warm <= now < one.ends]
    if not current:
        return "off", None
    last = max(current, key=lambda one: one.ends)
    return ("class" if any(one.begins <= now for one in current) else "prewarm"), last


def just_ended(
    hours: Iterable[ClassHours], term: Term | None, now: float, within_s: float
) -> Lesson | None:
    """The meeting that ended in the last `within_s` seconds, where none goes on now."""
    every = lessons(hours, term, now)
    if any(one.warm <= now < one.ends for one in every):
        return None
    ended = [one for one in every if one.ends <= now < one.ends + within_s]
    return max(ended, key=lambda one: one.ends) if ended else None


def following(hours: Iterable[ClassHours], term: Term | None, now: float) -> Lesson | None:
    """The next meeting that is still to be prepared for, within a week."""
    return next((one for one in lessons(hours, term, now) if one.warm > now), None)


def _in_term(day: date, term: Term | None) -> bool:
    return term is None or term.first <= day <= term.last


def _at(day: date, second: int, zone: ZoneInfo) -> float:
    """The moment when clocks there show that second of that day; 24:00 is the next day's 0:00."""
    whole, rest = divmod(second, 86_400)
    local = datetime.combine(day + timedelta(days=whole), datetime.min.time(), zone)
    return (
        local.replace(hour=rest // 3600, minute=rest % 3600 // 60, second=rest % 60)
    ).timestamp()

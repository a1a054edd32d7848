"""How much of a term's class hours is still to come. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from labctl.config.course_schema import ClassHours, Term
from labctl.courses.records.timetable import Lesson, lessons

HOUR_S = 3600.0
WEEK_S = 7 * 86_400


def class_hours(
    hours: Sequence[ClassHours], term: Term | None, since: float, until: float
) -> float:
    """Hours, prewarming included, in which servers of the class are up; overlaps count once."""
    found: set[Lesson] = set()
    around = since
    while around < until + WEEK_S:
        found.update(lessons(hours, term, around))
        around += WEEK_S
    total, at = 0.0, since
    for one in sorted(found, key=lambda lesson: (lesson.warm, lesson.ends)):
        begin, end = max(one.warm, at), min(one.ends, until)
        total += max(0.0, end - begin)
        at = max(at, end)
    return total / HOUR_S


def ends_at(term: Term, zone: str = "UTC") -> float:
    """The end of the term's last day, by the clocks of a zone, in Unix seconds."""
    after = term.last + timedelta(days=1)
    return datetime.combine(after, datetime.min.time(), ZoneInfo(zone)).timestamp()


def begins_at(term: Term, zone: str = "UTC") -> float:
    """The beginning of its first day."""
    return datetime.combine(term.first, datetime.min.time(), ZoneInfo(zone)).timestamp()

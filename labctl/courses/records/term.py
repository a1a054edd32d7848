"""The class hours of a term. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from labctl.config.course_schema import ClassHours, Term
from labctl.courses.records.timetable import Lesson, list_lessons

HOUR_S = 3600.0
WEEK_S = 7 * 86_400


def class_hours(
    hours: Sequence[ClassHours], term: Term | None, since: float, until: float
) -> float:
    """Return the hours of class between two Unix times, prewarming included.

    Overlapping lessons count once.
    """
    upcoming: set[Lesson] = set()
    around = since
    while around < until + WEEK_S:
        upcoming.update(list_lessons(hours, term, around))
        around += WEEK_S
    total, at = 0.0, since
    for lesson in sorted(upcoming, key=lambda lesson: (lesson.warm, lesson.ends)):
        begin, end = max(lesson.warm, at), min(lesson.ends, until)
        total += max(0.0, end - begin)
        at = max(at, end)
    return total / HOUR_S


def term_end(term: Term, zone: str = "UTC") -> float:
    """Return the end of the term's last day in a time zone, in Unix seconds."""
    after = term.last + timedelta(days=1)
    return datetime.combine(after, datetime.min.time(), ZoneInfo(zone)).timestamp()


def term_start(term: Term, zone: str = "UTC") -> float:
    """Return the start of the term's first day in a time zone, in Unix seconds."""
    return datetime.combine(term.first, datetime.min.time(), ZoneInfo(zone)).timestamp()

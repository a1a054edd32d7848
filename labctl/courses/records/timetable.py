"""The timetable of a course: its class hours, each in its own time zone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Literal
from zoneinfo import ZoneInfo

from labctl.config.course_schema import DAYS, ClassHours, CourseConfig, Term
from labctl.config.times import Holiday
from labctl.model import Value

HOUR_S = 3600.0
WEEK_S = 7 * 86_400
Phase = Literal["prewarm", "class", "off"]


class Lesson(Value, frozen=True):
    """One meeting of the class, in Unix seconds; servers are needed from `warm` to `ends`."""

    warm: float
    begins: float
    ends: float


def list_lessons(
    hours: Iterable[ClassHours],
    term: Term | None,
    at: float,
    holidays: Sequence[Holiday] = (),
) -> list[Lesson]:
    """Return the meetings from two days before to eight days after `at`, in order.

    When clocks change, an hour that is skipped starts after the change, and of an hour that occurs
    twice the first one counts.
    """
    meetings = []
    for slot in hours:
        zone = ZoneInfo(slot.zone)
        today = datetime.fromtimestamp(at, zone).date()
        for shift in range(-2, 9):
            day = today + timedelta(days=shift)
            is_class_day = _is_in_term(day, term) and not _is_holiday(day, holidays)
            if DAYS[day.weekday()] in slot.days and is_class_day:
                begins, ends = (
                    _to_timestamp(day, second, zone) for second in (slot.begins, slot.ends)
                )
                meetings.append(Lesson(warm=begins - slot.prewarm, begins=begins, ends=ends))
    return sorted(meetings, key=lambda lesson: (lesson.warm, lesson.ends))


def find_phase(
    hours: Iterable[ClassHours],
    term: Term | None,
    now: float,
    holidays: Sequence[Holiday] = (),
) -> tuple[Phase, Lesson | None]:
    """Return the phase of the class at `now`, and its meeting: of several, the last to end."""
    current = [
        lesson
        for lesson in list_lessons(hours, term, now, holidays)
        if lesson.warm <= now < lesson.ends
    ]
    if not current:
        return "off", None
    last = max(current, key=lambda lesson: lesson.ends)
    return ("class" if any(lesson.begins <= now for lesson in current) else "prewarm"), last


def find_just_ended(
    hours: Iterable[ClassHours],
    term: Term | None,
    now: float,
    within_s: float,
    holidays: Sequence[Holiday] = (),
) -> Lesson | None:
    """Return the meeting that ended in the last `within_s` seconds, unless one is active now."""
    every = list_lessons(hours, term, now, holidays)
    if any(lesson.warm <= now < lesson.ends for lesson in every):
        return None
    ended = [lesson for lesson in every if lesson.ends <= now < lesson.ends + within_s]
    return max(ended, key=lambda lesson: lesson.ends) if ended else None


def _is_in_term(day: date, term: Term | None) -> bool:
    return term is None or term.first <= day <= term.last


def _is_holiday(day: date, holidays: Iterable[Holiday]) -> bool:
    return any(holiday.first <= day <= holiday.last for holiday in holidays)


def _to_timestamp(day: date, second: int, zone: ZoneInfo) -> float:
    """Return the Unix time of that second of the day in the zone; 24:00 is the next day's 0:00."""
    days, second_of_day = divmod(second, 86_400)
    local = datetime.combine(day + timedelta(days=days), datetime.min.time(), zone)
    return (
        local.replace(
            hour=second_of_day // 3600, minute=second_of_day % 3600 // 60, second=second_of_day % 60
        )
    ).timestamp()


def class_hours(
    hours: Sequence[ClassHours],
    term: Term | None,
    since: float,
    until: float,
    holidays: Sequence[Holiday] = (),
) -> float:
    """Return the hours of class between two Unix times, prewarming included.

    Overlapping lessons count once.
    """
    upcoming: set[Lesson] = set()
    at = since
    while at < until + WEEK_S:
        upcoming.update(list_lessons(hours, term, at, holidays))
        at += WEEK_S
    total, at = 0.0, since
    for lesson in sorted(upcoming, key=lambda lesson: (lesson.warm, lesson.ends)):
        begin, end = max(lesson.warm, at), min(lesson.ends, until)
        total += max(0.0, end - begin)
        at = max(at, end)
    return total / HOUR_S


def find_zone(config: CourseConfig) -> tzinfo:
    """Return the course's time zone: that of its class hours, else of a due time, else UTC."""
    dues = [rules.due for rules in config.assignments.values() if rules.due is not None]
    names = [slot.zone for slot in config.hours] + [due.zone for due in dues if due.zone]
    if names:
        return ZoneInfo(names[0])
    offsets = [timezone(timedelta(seconds=due.offset_s)) for due in dues if due.offset_s]
    return offsets[0] if offsets else UTC


def list_pauses(config: CourseConfig) -> tuple[tuple[int, int], ...]:
    """Return the holidays as stretches of Unix time in the course's zone, ordered and disjoint."""
    zone, pauses = find_zone(config), list[tuple[int, int]]()
    for holiday in sorted(config.holidays, key=lambda one: (one.first, one.last)):
        begin, end = (
            round(datetime.combine(day, datetime.min.time(), zone).timestamp())
            for day in (holiday.first, holiday.last + timedelta(days=1))
        )
        if pauses and begin <= pauses[-1][1]:
            begin, end = pauses[-1][0], max(end, pauses[-1][1])
            pauses.pop()
        pauses.append((begin, end))
    return tuple(pauses)


def short_time_text(at: float, zone: tzinfo, now: float) -> str:
    """Write a Unix time in a zone: 28 Nov 23:59, with the year if it is not that of `now`."""
    time = datetime.fromtimestamp(at, zone)
    year = "" if time.year == datetime.fromtimestamp(now, zone).year else " %Y"
    return f"{time:%d %b{year} %H:%M}"


def term_end(term: Term, zone: str = "UTC") -> float:
    """Return the end of the term's last day in a time zone, in Unix seconds."""
    after = term.last + timedelta(days=1)
    return datetime.combine(after, datetime.min.time(), ZoneInfo(zone)).timestamp()


def term_start(term: Term, zone: str = "UTC") -> float:
    """Return the start of the term's first day in a time zone, in Unix seconds."""
    return datetime.combine(term.first, datetime.min.time(), ZoneInfo(zone)).timestamp()

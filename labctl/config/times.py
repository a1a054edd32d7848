"""Times with zones: their parsers, their text, and the rules of an assignment."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo

from labctl.config.document import quote
from labctl.config.scalars import format_duration, parse_duration
from labctl.lazy import lazy_imports
from labctl.model import Value

with lazy_imports(__name__):
    import zoneinfo

DEFAULT_MAX_BYTES = 500 * 10**6
# The late rule "any": submissions are accepted however late they are.
ANY_S = -1
# Time after the due time in which a course's submissions still count as on time.
DEFAULT_GRACE_S = 600
# The parts that an assignment may require in a bundle.
PARTS = ("model", "logs", "report", "code", "evaluation")
# How a missing submission counts: as 0 points, or as no grade.
MISSING_RULES = ("0", "none")
_LOCAL = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?) ?(\S+)")
_OFFSET = re.compile(r"Z|UTC|[+-]\d\d:\d\d")
_PERCENT = re.compile(r"(\d{1,3})%?")


class Moment(Value, frozen=True):
    """A time as it was written: `at` in Unix seconds, `offset_s` east of UTC.

    `zone` is the name of its time zone, "" if it was written with an offset.
    """

    at: int
    offset_s: int = 0
    zone: str = ""

    def __str__(self) -> str:
        zone = timezone(timedelta(seconds=self.offset_s))
        return datetime.fromtimestamp(self.at, zone).isoformat()


def load_zone(name: str, due: Moment | None) -> tzinfo:
    """Return the time zone of this name; the offset of `due`, or UTC, if this machine lacks it."""
    if name:
        try:
            return zoneinfo.ZoneInfo(name)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            pass
    return timezone(timedelta(seconds=due.offset_s)) if due is not None and due.offset_s else UTC


def local_time_text(at: float, zone: tzinfo) -> str:
    """Write a Unix time in a zone: Sat 28 Nov 2026 23:59 Europe/Berlin."""
    return f"{datetime.fromtimestamp(at, zone):%a %d %b %Y %H:%M} {zone}"


def machine_time_text(at: float) -> str:
    """Write a Unix time in this machine's zone: Sat 28 Nov 2026 23:59 CET."""
    return f"{datetime.fromtimestamp(at).astimezone():%a %d %b %Y %H:%M %Z}"


def parse_zone_name(text: str) -> str:
    """Check the name of a time zone, which this machine need not know."""
    if not re.fullmatch(r"[A-Za-z0-9_+/-]{1,64}", text):
        raise ValueError(f"{quote(text)} is not the name of a time zone: Europe/Berlin")
    return text


class Holiday(Value, frozen=True):
    """The days from `first` to `last`, without class and without late days."""

    first: date
    last: date


def parse_date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{quote(text)} is not a date: write 2026-09-01") from None


def parse_holiday(text: str) -> Holiday:
    """Parse `2026-12-24`, or `2026-12-25..2027-01-06`, which includes both days."""
    first, dots, last = text.partition("..")
    holiday = Holiday(first=parse_date(first), last=parse_date(last if dots else first))
    if holiday.last < holiday.first:
        raise ValueError(f"{quote(text)} ends before it begins")
    return holiday


def parse_moment(text: str) -> Moment:
    """Parse a time with its zone, which is required.

    For example `2026-11-28 23:59 Europe/Berlin`, `2026-11-28T23:59+01:00` or `... UTC`.
    """
    match = _LOCAL.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{quote(text)} is not a time with a zone: write 2026-11-28 23:59 Europe/Berlin, "
            "or 2026-11-28T23:59+01:00"
        )
    day, hour, zone = match.groups()
    try:
        local = datetime.fromisoformat(f"{day}T{hour}")
    except ValueError as error:
        raise ValueError(f"{quote(text)} is not a time: {error}") from None
    if _OFFSET.fullmatch(zone):
        offset = "+00:00" if zone in ("Z", "UTC") else zone
        try:
            moment = datetime.fromisoformat(f"{day}T{hour}{offset}")
        except ValueError as error:
            raise ValueError(f"{quote(text)} is not a time: {error}") from None
        zone = ""
    else:
        moment = _resolve_in_zone(text, local, zone)
    shift = moment.utcoffset() or timedelta()
    return Moment(at=round(moment.timestamp()), offset_s=round(shift.total_seconds()), zone=zone)


def _resolve_in_zone(text: str, local: datetime, name: str) -> datetime:
    """Find the one moment at which clocks in a zone show this time; ValueError if not just one."""
    try:
        zone = zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"{quote(text)}: this machine has no time zone {quote(name)}; write an offset: +01:00"
        ) from None
    first, second = (local.replace(tzinfo=zone, fold=fold) for fold in (0, 1))
    if first.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != local:
        raise ValueError(f"{quote(text)}: clocks skip this time there; write another time")
    if first.utcoffset() != second.utcoffset():
        times = " or ".join(one.isoformat(timespec="minutes") for one in (first, second))
        raise ValueError(f"{quote(text)}: this time occurs twice there; write {times}")
    return first


def parse_late(text: str) -> int:
    """Parse a late rule into seconds after the due time: 0 for `never`, ANY_S for `any`."""
    if text == "never":
        return 0
    if text == "any":
        return ANY_S
    try:
        return parse_duration(text)
    except ValueError:
        raise ValueError(
            f"{quote(text)} is not a late rule: write never, any, or a duration such as 48h"
        ) from None


def parse_grace(text: str) -> int:
    """Parse a grace period into seconds; `none` is 0."""
    if text == "none":
        return 0
    try:
        return parse_duration(text)
    except ValueError:
        raise ValueError(f"{quote(text)} is not a grace period: write none, or 10m") from None


def late_text(late_s: int) -> str:
    return {0: "never", ANY_S: "any"}.get(late_s) or format_duration(late_s)


def parse_penalty(text: str) -> int:
    match = _PERCENT.fullmatch(text)
    if match is None or int(match[1]) > 100:
        raise ValueError(
            f"{quote(text)} is not a penalty: "
            "write percent for each day or part of a day, such as 10%"
        )
    return int(match[1])


def parse_free_days(text: str) -> int:
    if not re.fullmatch(r"\d{1,3}", text):
        raise ValueError(f"{quote(text)} is not a number of days, such as 4")
    return int(text)


def parse_missing(text: str) -> str:
    if text not in MISSING_RULES:
        raise ValueError(
            f"{quote(text)} is not a rule for missing submissions: write 0, "
            "or none, which leaves them without a grade"
        )
    return text


def parse_part(text: str) -> str:
    if text not in PARTS:
        raise ValueError(f"{quote(text)} cannot be required; use one of {', '.join(PARTS)}")
    return text

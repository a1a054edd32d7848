"""Times with zones and an assignment's rules, as people write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

from labctl.config.document import shown
from labctl.config.scalars import duration_text, parse_duration
from labctl.model import Value

DEFAULT_MAX_BYTES = 500 * 10**6
# As a late rule: however late.
ANY_S = -1
# What an assignment may require of a bundle.
PARTS = ("model", "logs", "report", "code", "evaluation")
_LOCAL = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?) ?(\S+)")
_OFFSET = re.compile(r"Z|UTC|[+-]\d\d:\d\d")
_PERCENT = re.compile(r"(\d{1,3})%?")


class Moment(Value, frozen=True):
    """A time as somebody wrote it: `at` in Unix seconds, `offset_s` east of UTC."""

    at: int
    offset_s: int = 0

    def __str__(self) -> str:
        zone = timezone(timedelta(seconds=self.offset_s))
        return datetime.fromtimestamp(self.at, zone).isoformat()


def parse_moment(text: str) -> Moment:
    """`2026-11-28 23:59 Europe/Berlin`, `2026-11-28T23:59+01:00`, `... UTC`. A zone is required."""
    match = _LOCAL.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{shown(text)} is no time with a zone: write 2026-11-28 23:59 Europe/Berlin, "
            "or 2026-11-28T23:59+01:00"
        )
    day, hour, zone = match.groups()
    try:
        local = datetime.fromisoformat(f"{day}T{hour}")
    except ValueError as error:
        raise ValueError(f"{shown(text)} is no time: {error}") from None
    if _OFFSET.fullmatch(zone):
        offset = "+00:00" if zone in ("Z", "UTC") else zone
        try:
            found = datetime.fromisoformat(f"{day}T{hour}{offset}")
        except ValueError as error:
            raise ValueError(f"{shown(text)} is no time: {error}") from None
    else:
        found = _in_zone(text, local, zone)
    shift = found.utcoffset() or timedelta()
    return Moment(at=round(found.timestamp()), offset_s=round(shift.total_seconds()))


def _in_zone(text: str, local: datetime, name: str) -> datetime:
    """The one moment that clocks in a zone show so."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        zone = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"{shown(text)}: this machine knows no zone {shown(name)}; write an offset, as +01:00"
        ) from None
    first, second = (local.replace(tzinfo=zone, fold=fold) for fold in (0, 1))
    if first.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != local:
        raise ValueError(f"{shown(text)}: clocks skip this time there; write an offset, as +01:00")
    if first.utcoffset() != second.utcoffset():
        raise ValueError(f"{shown(text)}: clocks show it twice there; write an offset, as +01:00")
    return first


def parse_late(text: str) -> int:
    """Seconds after the due time: 0 for `never`, ANY_S for `any`, else a duration."""
    if text == "never":
        return 0
    if text == "any":
        return ANY_S
    try:
        return parse_duration(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is no late rule: never, any, or how long: 48h") from None


def late_text(late_s: int) -> str:
    return {0: "never", ANY_S: "any"}.get(late_s) or duration_text(late_s)


def parse_penalty(text: str) -> int:
    match = _PERCENT.fullmatch(text)
    if match is None or int(match[1]) > 100:
        raise ValueError(f"{shown(text)} is no penalty: percent for each day begun, such as 10%")
    return int(match[1])


def parse_part(text: str) -> str:
    if text not in PARTS:
        raise ValueError(f"{shown(text)} cannot be required; one of {', '.join(PARTS)}")
    return text

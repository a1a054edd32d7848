"""A provider's reclaim notices, and what follows from them, as pure functions.

All spans are seconds. `now_s` is time since boot, which clock changes do not affect. A notice's
date is compared with the Date of its own HTTP response.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import NamedTuple, Sequence

from ...wire.codec import Message, MessageError, decode
from ...wire.watchdog import ClientNoticeRecord
from .imds_objects import InstanceAction, RebalanceRecommendation

INTERRUPTION, REBALANCE = "interruption", "rebalance"
# For a notice without a readable date: AWS gives two minutes, and is polled every few seconds.
USUAL_S = 110.0
MARGIN_S = 2.0
# seconds that a mirror takes before its first byte
SEND_S = 3.0
# A server that still exists this many seconds after its notice's end was not reclaimed.
PASSED_S = 60.0


class ReclaimNotice(NamedTuple):
    """A notice. `left_s` is the time left now, 0 for a recommendation. `stamp` identifies it.

    `action` is AWS's word for what will happen: terminate, stop, hibernate. `source` is its sender.
    """

    kind: str
    stamp: str
    left_s: float = 0.0
    action: str = ""
    source: str = "IMDS"


def parse_interruption(body: str, dated_s: float) -> ReclaimNotice:
    """Parse spot/instance-action from a response with the Date `dated_s` (Unix seconds)."""
    announced = _parse_object(InstanceAction(), body)
    at = _parse_date(announced.time)
    left_s = USUAL_S if at is None else max(0.0, at - dated_s)
    action = announced.action or "terminate"
    return ReclaimNotice(INTERRUPTION, announced.time or body, left_s, action)


def parse_rebalance(body: str) -> ReclaimNotice:
    """Parse events/recommendations/rebalance."""
    recommendation = _parse_object(RebalanceRecommendation(), body)
    return ReclaimNotice(REBALANCE, recommendation.noticeTime or body)


def convert_client_notice(
    given: ClientNoticeRecord, boot: str, now_s: float
) -> ReclaimNotice | None:
    """Return the notice that a client gave; None if it has expired or is from another boot."""
    if given.boot != boot or now_s > given.ends_s + PASSED_S:
        return None
    left_s = max(0.0, given.ends_s - now_s)
    kind = REBALANCE if given.kind == REBALANCE else INTERRUPTION
    return ReclaimNotice(kind, given.stamp, left_s, given.action, given.source)


class HandledNotices(NamedTuple):
    """The notice that is under way until `ends_s`, and the stamps of all handled notices."""

    under_way: ReclaimNotice | None = None
    ends_s: float = 0.0
    stamps: tuple[str, ...] = ()


def decide_reclaim_action(
    acted: HandledNotices, notices: Sequence[ReclaimNotice], now_s: float
) -> tuple[HandledNotices, str]:
    """Return what to do now: "wind down", "mirror", "passed" (no reclaim) or "", once per notice.

    A second notice while one is under way can only bring its end forward.
    """
    action = ""
    for notice in notices:
        if notice.stamp in acted.stamps:
            continue
        acted = acted._replace(stamps=(*acted.stamps, notice.stamp))
        ends_s = now_s + notice.left_s
        if notice.kind == REBALANCE:
            action = action or ("" if acted.under_way else "mirror")
        elif acted.under_way:
            acted = acted._replace(ends_s=min(acted.ends_s, ends_s))
        else:
            acted, action = acted._replace(under_way=notice, ends_s=ends_s), "wind down"
    if not action and acted.under_way and now_s > acted.ends_s + PASSED_S:
        return acted._replace(under_way=None, ends_s=0.0), "passed"
    return acted, action


def limit_stop_s(left_s: float, unsaved_bytes: float, rate_bytes_s: float, mirrored: bool) -> float:
    """Return how long to wait for checkpoints and still send them: at least half the time left."""
    usable_s = max(0.0, left_s - MARGIN_S)
    send_s = SEND_S + unsaved_bytes / max(rate_bytes_s, 1.0) if mirrored else 0.0
    return max(usable_s / 2, usable_s - send_s)


def _parse_object(empty: Message, body: str) -> Message:
    """Parse an object; an unreadable one is a notice all the same, and counts as `empty`."""
    try:
        return decode(type(empty), body)
    except MessageError:
        return empty


def _parse_date(text: str) -> float | None:
    """Return the Unix time of text like 2017-09-18T08:22:00Z; None if it is not a time."""
    try:
        moment = datetime.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return None
    return moment.replace(tzinfo=timezone.utc).timestamp()

"""What a provider says of taking this server back, and what follows from it. Pure.

All spans are seconds. `now_s` is time since boot, which no change of the date moves; a notice's
date is compared with the date of the answer that it came with.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any, NamedTuple, Sequence

INTERRUPTION, REBALANCE = "interruption", "rebalance"
# AWS gives two minutes, and is asked every few seconds: for a notice whose date is unreadable.
USUAL_S = 110.0
MARGIN_S = 2.0
# A mirror takes so long before its first byte.
SEND_S = 3.0
# A server that is still there so long after the end of its notice was not taken back.
PASSED_S = 60.0


class Notice(NamedTuple):
    """`left_s` is what is left of it now, 0 for a recommendation. `stamp` tells it from others.

    `action` is AWS's word for what will happen: terminate, stop, hibernate. `source` says who gave
    it.
    """

    kind: str
    stamp: str
    left_s: float = 0.0
    action: str = ""
    source: str = "IMDS"


def interruption(body: str, dated_s: float) -> Notice:
    """From the text of spot/instance-action, in an answer of the date `dated_s` (Unix)."""
    said = _object(body)
    at = _date(said.get("time"))
    left_s = USUAL_S if at is None else max(0.0, at - dated_s)
    action = str(said.get("action") or "terminate")
    return Notice(INTERRUPTION, str(said.get("time") or body), left_s, action)


def rebalance(body: str) -> Notice:
    """From the text of events/recommendations/rebalance."""
    return Notice(REBALANCE, str(_object(body).get("noticeTime") or body))


def handed(body: dict[str, Any], boot: str, now_s: float) -> Notice | None:
    """The notice that a client has handed over (a file); None where it is over or of another boot.

    "ends_s" is since boot.
    """
    if not body or body.get("boot") != boot or now_s > float(body["ends_s"]) + PASSED_S:
        return None
    left_s = max(0.0, float(body["ends_s"]) - now_s)
    kind = REBALANCE if body["kind"] == REBALANCE else INTERRUPTION
    return Notice(kind, str(body["stamp"]), left_s, str(body["action"]), str(body["source"]))


class Acted(NamedTuple):
    """What was acted on: the notice that is under way until `ends_s`, and the stamps of all."""

    under_way: Notice | None = None
    ends_s: float = 0.0
    stamps: tuple[str, ...] = ()


def decide(acted: Acted, heard: Sequence[Notice], now_s: float) -> tuple[Acted, str]:
    """What to do now: "wind down", "mirror", "passed" (nobody came) or "", each once for a notice.

    A second notice while one is under way can only bring its end forward.
    """
    do = ""
    for notice in heard:
        if notice.stamp in acted.stamps:
            continue
        acted = acted._replace(stamps=(*acted.stamps, notice.stamp))
        ends_s = now_s + notice.left_s
        if notice.kind == REBALANCE:
            do = do or ("" if acted.under_way else "mirror")
        elif acted.under_way:
            acted = acted._replace(ends_s=min(acted.ends_s, ends_s))
        else:
            acted, do = acted._replace(under_way=notice, ends_s=ends_s), "wind down"
    if not do and acted.under_way and now_s > acted.ends_s + PASSED_S:
        return acted._replace(under_way=None, ends_s=0.0), "passed"
    return acted, do


def stop_within_s(
    left_s: float, unsaved_bytes: float, rate_bytes_s: float, mirrored: bool
) -> float:
    """How long to wait for checkpoints, so that they can still be sent: half of it at least."""
    usable_s = max(0.0, left_s - MARGIN_S)
    send_s = SEND_S + unsaved_bytes / max(rate_bytes_s, 1.0) if mirrored else 0.0
    return max(usable_s / 2, usable_s - send_s)


def _object(body: str) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _date(text: Any) -> float | None:
    """Unix time of 2017-09-18T08:22:00Z; None where it is none."""
    try:
        moment = datetime.strptime(str(text)[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return None
    return moment.replace(tzinfo=timezone.utc).timestamp()

"""The servers of a course, as its ledger describes them: `up`, `cost` and `down` lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.model import Server

# How the reason of a `down` line begins if nobody saw the server's end.
UNSEEN = "ended unseen"


@dataclass
class LedgerServer:
    """A server in the ledger: until when its cost is recorded, and whether its end is."""

    seat: str
    since: float
    until: float
    price: float
    idle_s: float = 0.0
    ended: bool = False
    up_at: float = 0.0
    # "" in lines from before the provider was recorded.
    provider: str = ""
    # "" if its provider has no accounts, and in lines from before the account was recorded.
    account: str = ""


def up_line(seat: str, server: Server, by: str = "") -> CourseLedgerDraft:
    """Return the ledger line of a server's start, from its tags."""
    offer = server.offer
    return CourseLedgerDraft(
        kind="up",
        seat=seat,
        by=by,
        detail={
            "server_id": server.id,
            "usd_per_hour": offer.price_usd_per_hour,
            "spot": offer.spot,
            "type": offer.type,
            "provider": server.provider,
            "created_at": server.created_at,
            "account": server.account,
        },
    )


def read_servers(entries: Iterable[CourseLedgerEntry]) -> dict[str, LedgerServer]:
    """Return every server that the ledger mentions, by id."""
    servers: dict[str, LedgerServer] = {}
    for entry in entries:
        detail = entry.detail
        server_id = str(detail.get("server_id", ""))
        if not server_id:
            continue
        before = servers.get(server_id)
        if entry.kind == "up":
            since = float(detail.get("created_at", entry.at))
            until = max(since, before.until if before else since)
            price = float(detail.get("usd_per_hour", 0.0))
            idle_s = before.idle_s if before else 0.0
            servers[server_id] = LedgerServer(
                entry.seat,
                since,
                until,
                price,
                idle_s,
                up_at=entry.at,
                provider=str(detail.get("provider", "")),
                account=str(detail.get("account", "")),
            )
        elif before is not None and entry.kind == "cost":
            before.account = before.account or str(detail.get("account", ""))
            before.until = max(before.until, float(detail.get("until", entry.at)))
            before.idle_s += float(detail.get("idle_s", 0.0))
        elif before is not None and entry.kind == "down":
            before.ended = True
    return servers


def is_unseen_end(entry: CourseLedgerEntry) -> bool:
    """Whether a `down` line is of a server that was found gone: nobody saw its end.

    Lines of earlier versions have no field for it. They are recognized by their text, which new
    lines keep for earlier versions.
    """
    unseen = entry.detail.get("unseen")
    return entry.why.startswith(UNSEEN) if unseen is None else bool(unseen)

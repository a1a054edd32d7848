"""The record of kept disks: disks that outlived their servers because nothing else had the results.

A disk stays on record until it is known to be gone: `cost` and `status` read only this record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from labctl.errors import LabError
from labctl.events import Note
from labctl.model import Resource
from labctl.servers import accounts
from labctl.servers.context import LabContext
from labctl.state.disks import (
    MISSED,
    REMOVED,
    SEEN,
    KeptDisk,
    StoppedDisk,
    is_expired,
    list_kept_disks,
)
from labctl.text import dollars_text


def record_shown(
    context: LabContext, shown: Iterable[Resource], lab_id: str | None
) -> list[Resource]:
    """Record which kept disks a provider's list shows, of one lab or of all, and return them."""
    disks = [one for one in shown if one.expires_at and lab_id in (None, one.lab_id)]
    recorded = {kept.disk.id: kept for kept in list_kept_disks(context.state, lab_id)}
    for disk in disks:
        before = recorded.pop(disk.id, None)
        if before is None or before.missed_at or _detach(before.disk) != _detach(disk):
            _record(context, SEEN, disk)
    for kept in recorded.values():
        account = kept.disk.account
        if kept.disk.provider != context.provider.name or accounts.is_elsewhere(context, account):
            continue
        # It may be in a region that was not searched, or in an account that is not on record.
        if context.everywhere and accounts.is_attributed(context, account):
            _record(context, REMOVED, kept.disk)
        elif not kept.missed_at:
            _record(context, MISSED, kept.disk)
    return disks


def _detach(disk: Resource) -> Resource:
    """Return the disk without its server, whose end does not change the disk."""
    return msgspec.structs.replace(disk, server_id="")


def record_removed(context: LabContext, resource: Resource) -> None:
    """Record that the provider has removed a resource, if it was a kept disk."""
    if resource.expires_at:
        _record(context, REMOVED, resource)


def _record(context: LabContext, kind: str, disk: Resource) -> None:
    detail = {"disk": msgspec.to_builtins(disk)}
    context.state.record(kind, lab_id=disk.lab_id, detail=detail)


def remove_expired(context: LabContext, shown: Iterable[Resource]) -> None:
    """Remove the expired disks among those that the provider shows now.

    Tries every disk, then raises the first error.
    """
    first_error: LabError | None = None
    for disk in filter(is_expired, list(shown)):
        try:
            context.provider.remove(disk)
        except LabError as error:
            first_error = first_error or error
            continue
        record_removed(context, disk)
        notify_removed(context, disk)
    if first_error is not None:
        raise first_error


def notify_removed(context: LabContext, disk: Resource) -> None:
    """Tell the user that a disk was removed because it had expired."""
    text = f"removed the kept disk {get_id_without_region(disk)}: {expiry_text(disk)}"
    context.reporter.emit(Note(text=text, level="warning"))


def day_text(at: float) -> str:
    """Return "2026-01-31" for Unix seconds, in this machine's time zone."""
    return time.strftime("%Y-%m-%d", time.localtime(at))


def cost_text(disk: Resource) -> str:
    """Return "$2.40 a month, kept until 2026-01-31", in this machine's time zone."""
    return ", ".join(filter(None, [monthly_cost_text(disk), expiry_text(disk)]))


def monthly_cost_text(resource: Resource) -> str:
    """Return "$2.40 a month", or "free"."""
    price = resource.price_usd_per_month
    return f"{dollars_text(price)} a month" if price else "free"


def get_id_without_region(disk: Resource) -> str:
    """Return the id without its region: shorter, and just as unique."""
    return disk.id.partition(".")[0]


def expiry_text(disk: Resource) -> str:
    """Say how long a kept disk stays; "" for any other resource."""
    if not disk.expires_at:
        return ""
    day = day_text(disk.expires_at)
    return f"expired on {day}" if disk.expires_at < time.time() else f"kept until {day}"


def describe_kept_disk(kept: KeptDisk) -> str:
    """Describe a recorded kept disk in one line."""
    text = f"kept disk {get_id_without_region(kept.disk)}: {cost_text(kept.disk)}"
    return f"{text}; no longer listed by {kept.disk.provider}" if kept.missed_at else text


def describe_stopped_disk(disk: StoppedDisk) -> str:
    """Describe the disk of a stopped server, its price, and what removes it when."""
    price = disk.usd_per_month
    cost = f"costs {dollars_text(price)} a month" if price else "keeps everything on it"
    if not disk.until:
        return f"its disk {cost} until you remove it with labctl down"
    day = day_text(disk.until)
    return f"its disk {cost}; the provider's timer removes it on {day} unless you start it before"

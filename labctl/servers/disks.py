"""Kept disks on record: what outlived its server since nothing else had its results.

A disk that was seen stays on record until it is known to be gone: `cost` and `status` read nothing
else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from labctl.errors import LabError
from labctl.events import Note
from labctl.model import Resource
from labctl.servers import accounts
from labctl.servers.context import Ground
from labctl.state.disks import MISSED, REMOVED, SEEN, KeptDisk, is_expired, list_kept_disks


def looked(ground: Ground, shown: Iterable[Resource], lab_id: str | None) -> list[Resource]:
    """Write down which kept disks a provider's list shows, of a lab or of all; returns them."""
    disks = [one for one in shown if one.expires_at and lab_id in (None, one.lab_id)]
    known = {one.disk.id: one for one in list_kept_disks(ground.state, lab_id)}
    for disk in disks:
        before = known.pop(disk.id, None)
        if before is None or before.missed_at or _plain(before.disk) != _plain(disk):
            _record(ground, SEEN, disk)
    for one in known.values():
        account = one.disk.account
        if one.disk.provider != ground.provider.name or accounts.is_elsewhere(ground, account):
            continue
        # A region that was not asked may have it, or an account that nobody wrote down.
        if ground.everywhere and accounts.is_attributed(ground, account):
            _record(ground, REMOVED, one.disk)
        elif not one.missed_at:
            _record(ground, MISSED, one.disk)
    return disks


def _plain(disk: Resource) -> Resource:
    return msgspec.structs.replace(disk, server_id="")


def removed(ground: Ground, resource: Resource) -> None:
    """Write down that the provider has removed it, where it was a kept disk."""
    if resource.expires_at:
        _record(ground, REMOVED, resource)


def _record(ground: Ground, kind: str, disk: Resource) -> None:
    detail = {"disk": msgspec.to_builtins(disk)}
    ground.state.record(kind, lab_id=disk.lab_id, detail=detail)


def remove_expired(ground: Ground, shown: Iterable[Resource]) -> None:
    """Remove the disks whose time is over, of what the provider shows now.

    Raises the first error once every other disk was tried.
    """
    failed: LabError | None = None
    for disk in filter(is_expired, list(shown)):
        try:
            ground.provider.remove(disk)
        except LabError as error:
            failed = failed or error
            continue
        removed(ground, disk)
        tell_removed(ground, disk)
    if failed is not None:
        raise failed


def tell_removed(ground: Ground, disk: Resource) -> None:
    """Say that a disk went since its time was over."""
    text = f"removed the kept disk {short(disk)}: {until(disk)}"
    ground.reporter.emit(Note(text=text, level="warning"))


def day_text(at: float) -> str:
    """ "2026-01-31" for Unix seconds, in this machine's own time."""
    return time.strftime("%Y-%m-%d", time.localtime(at))


def costs(disk: Resource) -> str:
    """ "2.40 dollars a month, kept until 2026-01-31", in this machine's own time."""
    return ", ".join(filter(None, [f"{disk.price_usd_per_month:.2f} dollars a month", until(disk)]))


def short(disk: Resource) -> str:
    """The id without its region: narrower, and as unique."""
    return disk.id.partition(".")[0]


def until(disk: Resource) -> str:
    """How long a kept disk stays, "" of any other thing."""
    if not disk.expires_at:
        return ""
    day = day_text(disk.expires_at)
    return f"its time was over on {day}" if disk.expires_at < time.time() else f"kept until {day}"


def told(one: KeptDisk) -> str:
    """A kept disk on record, in one line."""
    said = f"kept disk {short(one.disk)}: {costs(one.disk)}"
    return f"{said}; not shown by {one.disk.provider} any more" if one.missed_at else said

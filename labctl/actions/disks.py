"""Kept disks: which servers' disks are to outlive them, and which disks did.

A disk that was seen without its server stays on record until it is known to be gone: `cost` and
`status` read nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

import msgspec

from labctl.actions import Note, accounts
from labctl.actions.ground import Ground
from labctl.actions.throttling import ask_patiently
from labctl.errors import LabError
from labctl.model import Resource, Server
from labctl.providers import Keep
from labctl.state.disks import MISSED, REMOVED, SEEN, KeptDisk, is_expired, list_kept_disks

HELD = "disk-held"
KEPT_S = 14 * 86_400.0
"""How long a disk stays after its server's deadline. The watchdog has the same (KEPT_DAYS)."""
LATER_S = 86_400.0  # an expiry that would move by less is left as it is


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


def keep_until(ground: Ground, server: Server, ends_at: float) -> bool:
    """Have the provider keep the server's disk for KEPT_S after `ends_at` (Unix seconds).

    Whether it will. An expiry is moved later, and never earlier.
    """
    provider, known = ground.provider, _held_until(ground, server) or 0.0
    until = ends_at + KEPT_S
    if not isinstance(provider, Keep):
        return False
    if known and until < known + LATER_S:
        return True
    try:
        kept = ask_patiently(partial(provider.keep_disk, server.id, until))
    except LabError as error:
        text = f"the disk of {server.alias} cannot be kept at its end: {error.what}"
        if known:
            text = f"the disk of {server.alias} is still kept until {_day(known)}: {error.what}"
        ground.reporter.emit(Note(text=text, level="warning"))
        return bool(known)
    if not kept:
        return False
    _record_held(ground, server, until)
    if not known:
        price = sum(disk.price_usd_per_month for disk in kept)
        text = (
            f"if {server.alias} ends by itself, its disk stays until {_day(until)} with what you "
            f"have not pulled, at {price:.2f} dollars a month; labctl down removes both"
        )
        ground.reporter.emit(Note(text=text))
    return True


def release(ground: Ground, server: Server) -> None:
    """Have the server's disk end with it, where it may have been kept: by this machine or another.

    Where the provider refuses, the disk may stay until its expiry, and the reporter says so.
    """
    provider = ground.provider
    if not isinstance(provider, Keep) or _held_until(ground, server) == 0.0:
        return
    try:
        ask_patiently(partial(provider.release_disk, server.id))
    except LabError as error:
        text = f"the disk of {server.alias} may outlive it: {error.what}; next: labctl orphans"
        ground.reporter.emit(Note(text=text, level="warning"))
        _record_held(ground, server, None)  # half of it may be done
        return
    _record_held(ground, server, 0.0)


def is_held(ground: Ground, server: Server) -> bool:
    """Whether the server's disk is to outlive it, as far as this machine knows."""
    return bool(_held_until(ground, server))


def _held_until(ground: Ground, server: Server) -> float | None:
    """When the disk that is to outlive the server expires (Unix seconds): 0.0 where none is to,
    None where this machine cannot know: another one made the server, or a release failed."""
    if lines := ground.state.events(server_id=server.id, kind=HELD, limit=1):
        until = lines[0].detail["expires_at"]
        return None if until is None else float(until)
    made_here = ground.state.events(server_id=server.id, kind="created", limit=1)
    return 0.0 if made_here else None


def _record_held(ground: Ground, server: Server, expires_at: float | None) -> None:
    detail = {"expires_at": expires_at}
    ground.state.record(HELD, lab_id=server.lab_id, server_id=server.id, detail=detail)


def _day(at: float) -> str:
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
    day = _day(disk.expires_at)
    return f"its time was over on {day}" if disk.expires_at < time.time() else f"kept until {day}"


def told(one: KeptDisk) -> str:
    """A kept disk on record, in one line."""
    said = f"kept disk {short(one.disk)}: {costs(one.disk)}"
    return f"{said}; not shown by {one.disk.provider} any more" if one.missed_at else said

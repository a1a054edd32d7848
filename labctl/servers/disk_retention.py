"""Have the provider keep disks that must outlive their servers, however these end."""

from __future__ import annotations

import time

from labctl.errors import LabError
from labctl.events import Note
from labctl.model import Resource, Server
from labctl.providers import Keep, Provider
from labctl.retry import retry_throttled_calls
from labctl.servers.context import LabContext
from labctl.servers.disks import day_text
from labctl.text import add_next, dollars_text

HELD = "disk-held"
KEPT_S = 14 * 86_400.0  # after the server's deadline; the watchdog has the same (KEPT_DAYS)
LATER_S = 86_400.0  # an expiry that would move by less is not moved


def can_keep(provider: Provider) -> bool:
    """Whether the provider can keep a server's disk."""
    return isinstance(provider, Keep)


def can_server_keep(provider: Provider) -> bool:
    """Whether the provider's servers can keep their disks themselves when they end."""
    return isinstance(provider, Keep) and provider.can_keep_itself


def keep_disk(context: LabContext, server: Server, until: float) -> list[Resource]:
    """Keep the server's disks until then (Unix seconds); return them, [] if this is impossible."""
    provider = context.provider
    return provider.keep_disk(server.id, until) if isinstance(provider, Keep) else []


def keep_until(context: LabContext, server: Server, ends_at: float) -> bool:
    """Have the provider keep the server's disk for KEPT_S after `ends_at` (Unix seconds).

    Returns whether it will. An expiry is only ever moved later.
    """
    provider, held_until = context.provider, _held_until(context, server) or 0.0
    until = ends_at + KEPT_S
    if not isinstance(provider, Keep):
        return False
    if held_until and until < held_until + LATER_S:
        return True
    try:
        disks = retry_throttled_calls()(provider.keep_disk, server.id, until)
    except LabError as error:
        text = f"the disk of {server.alias} will not be kept when the server ends: {error.what}"
        if held_until:
            day = day_text(held_until)
            text = f"the disk of {server.alias} is still kept until {day}: {error.what}"
        context.reporter.emit(Note(text=text, level="warning"))
        return bool(held_until)
    if not disks:
        return False
    _record_held(context, server, until)
    if not held_until:
        price = sum(disk.price_usd_per_month for disk in disks)
        text = (
            f"if {server.alias} ends by itself, its disk is kept until {day_text(until)} with the "
            f"results that you have not pulled, at {dollars_text(price)} a month; "
            f"{context.subject.end_all} removes the server and the disk"
        )
        context.reporter.emit(Note(text=text))
    return True


def renew(context: LabContext, server: Server) -> None:
    """Have a kept disk last for KEPT_S from now: a server without a deadline outlives any date."""
    until = _held_until(context, server)
    if until and until < time.time() + KEPT_S - LATER_S:
        keep_until(context, server, time.time())


def release(context: LabContext, server: Server) -> None:
    """Have the server's disk deleted with it, if this machine or another may have had it kept.

    If the provider refuses, the disk may stay until its expiry, and a warning says so.
    """
    provider = context.provider
    if not isinstance(provider, Keep) or _held_until(context, server) == 0.0:
        return
    try:
        retry_throttled_calls()(provider.release_disk, server.id)
    except LabError as error:
        text = f"the disk of {server.alias} may outlive it: {error.what}"
        context.reporter.emit(Note(text=add_next(text, "labctl orphans"), level="warning"))
        _record_held(context, server, None)  # the provider may have released a part of the disks
        return
    _record_held(context, server, 0.0)


def is_kept(context: LabContext, server: Server) -> bool:
    """Whether the server's disk will outlive it, as far as this machine knows."""
    return bool(_held_until(context, server))


def _held_until(context: LabContext, server: Server) -> float | None:
    """Return when the disk that outlives the server expires (Unix seconds), 0.0 without one.

    None if this machine cannot know: another one created the server, or a release failed.
    """
    if lines := context.state.list_events(server_id=server.id, kind=HELD, limit=1):
        until = lines[0].detail["expires_at"]
        return None if until is None else float(until)
    made_here = context.state.list_events(server_id=server.id, kind="created", limit=1)
    return 0.0 if made_here else None


def _record_held(context: LabContext, server: Server, expires_at: float | None) -> None:
    detail = {"expires_at": expires_at}
    context.state.record(HELD, lab_id=server.lab_id, server_id=server.id, detail=detail)

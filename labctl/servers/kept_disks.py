"""The kept disks of one lab: which exist, which are fully downloaded, which zones suit them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from labctl.decoding import convert_value
from labctl.errors import BusyError, NotFoundError, PolicyError
from labctl.events import Note
from labctl.model import Offer, Resource, Server
from labctl.providers import Keep
from labctl.retry import retry_on
from labctl.servers import disks
from labctl.servers.context import LabContext
from labctl.servers.disks import cost_text, get_id_without_region, record_shown
from labctl.state.disks import RESTORED, has_expired, list_kept_disks

SAVED = "restored-saved"
# Kind of the ledger's line about a disk that may have the only copy of a home directory's files.
HOME = "home-kept"
ATTACH_S = 120.0
ATTACH_PAUSE_S = 1.0


def list_shown_disks(context: LabContext, others: Iterable[str] = ()) -> list[Resource]:
    """List the lab's kept disks as the provider shows them now; none if it cannot keep disks.

    Also records those of `others`, the lab ids of further servers.
    """
    if not isinstance(context.provider, Keep):
        return []
    shown = context.provider.leftovers()
    for lab_id in others:
        record_shown(context, shown, lab_id)
    return record_shown(context, shown, context.lab_id)


def attach(context: LabContext, disk: Resource, server: Server) -> str:
    """Attach a kept disk; return its device. Waits while another server still has it attached."""
    if not isinstance(context.provider, Keep):
        raise PolicyError(
            f"{context.provider.name} cannot attach {get_id_without_region(disk)}",
            why="it keeps no disks",
            hint="labctl orphans",
        )
    policy = retry_on(BusyError, pause_s=ATTACH_PAUSE_S, deadline_s=ATTACH_S)
    return policy(context.provider.attach_kept_disk, disk, server.id)


def remove_expired(context: LabContext) -> None:
    """Remove the lab's expired disks at the provider, if this machine has an expired one on record.

    The provider's own dates decide: an expiry may have been moved since.
    """
    if has_expired(context.state, context.lab_id, context.provider.name):
        disks.remove_expired(context, list_shown_disks(context))


def sort_by_kept_disks(context: LabContext, offers: Sequence[Offer]) -> list[Offer]:
    """Sort the offers: those in the zone of one of the lab's kept disks first. Emits a Note.

    For a lab of a group the provider is queried only if the lab has had a server before.
    """
    if context.group and not context.state.list_events(
        lab_id=context.lab_id, kind="ready", limit=1
    ):
        return list(offers)
    kept_disks = list_shown_disks(context)
    zones = [disk.zone for disk in kept_disks if disk.zone]
    for disk in kept_disks:
        has_offer = any(offer.zone == disk.zone for offer in offers)
        text = f"the kept disk {get_id_without_region(disk)} holds earlier results"
        if disk.zone and not has_offer:
            text += f", but no offer is in {disk.zone}\n  it is not deleted: {cost_text(disk)}"
            context.reporter.emit(Note(text=text, level="warning"))
        elif disk.zone:
            context.reporter.emit(Note(text=f"{text}: trying {disk.zone} first"))
    return sorted(offers, key=lambda offer: offer.zone not in zones)


def list_restored(context: LabContext, server: Server) -> dict[str, Resource]:
    """Return the kept disks, by id, whose content was restored to the server."""
    lines = context.state.list_events(server_id=server.id, kind=RESTORED)
    restored = [convert_value(line.detail["disk"], Resource) for line in lines]
    return {disk.id: disk for disk in restored}


def note_saved(context: LabContext, server: Server) -> None:
    """Record that all of the server's results, and those of its kept disks, are downloaded."""
    for disk in list_restored(context, server).values():
        detail = {"disk": msgspec.to_builtins(disk)}
        context.state.record(SAVED, lab_id=context.lab_id, server_id=server.id, detail=detail)


def note_home(context: LabContext, server: Server, disks: Sequence[Resource]) -> None:
    """Record that the disks may have files of the home directory, which no restore copies."""
    for disk in disks:
        detail = {"disk": msgspec.to_builtins(disk)}
        context.state.record(HOME, lab_id=context.lab_id, server_id=server.id, detail=detail)


def is_saved(context: LabContext, disk: Resource) -> bool:
    """Whether everything on a kept disk has been downloaded and verified."""
    return _is_noted(context, disk, SAVED) and not _is_noted(context, disk, HOME)


def _is_noted(context: LabContext, disk: Resource, kind: str) -> bool:
    lines = context.state.list_events(lab_id=context.lab_id, kind=kind)
    return any(line.detail["disk"]["id"] == disk.id for line in lines)


def explain_missing_server(context: LabContext, error: NotFoundError) -> NotFoundError:
    """Add to the error of a missing server which kept disks hold its results."""
    kept = [one.disk for one in list_kept_disks(context.state, context.lab_id)]
    if kept:
        error.why = "\n".join(
            f"its results are on {get_id_without_region(d)}: {cost_text(d)}" for d in kept
        )
        error.hint = "labctl up\nlabctl pull"
    return error

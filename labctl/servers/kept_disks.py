"""The kept disks of one lab: which its provider shows, which are home, and where a server suits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.errors import NotFoundError
from labctl.events import Note
from labctl.model import Offer, Resource, Server
from labctl.providers import Keep
from labctl.servers import disks
from labctl.servers.context import Ground
from labctl.servers.disks import costs, looked, short
from labctl.state.disks import RESTORED, has_expired, list_kept_disks

SAVED = "restored-saved"


def look(ground: Ground) -> list[Resource]:
    """The lab's kept disks as the provider shows them now; none where it keeps no disks."""
    if not isinstance(ground.provider, Keep):
        return []
    return looked(ground, ground.provider.leftovers(), ground.lab_id)


def remove_expired(ground: Ground) -> None:
    """Remove the lab's kept disks whose time is over, where one is on record.

    The provider's word counts: an expiry may have been moved since.
    """
    if has_expired(ground.state, ground.lab_id, ground.provider.name):
        disks.remove_expired(ground, look(ground))


def nearest(ground: Ground, offers: Sequence[Offer]) -> list[Offer]:
    """The offers, those first that are in the zone of a kept disk of the lab; says what it does.

    A lab that shares its provider with a group is asked about only where it had a server before.
    """
    if ground.group and not ground.state.events(lab_id=ground.lab_id, kind="ready", limit=1):
        return list(offers)
    kept_disks = look(ground)
    zones = [disk.zone for disk in kept_disks if disk.zone]
    for disk in kept_disks:
        there = [offer for offer in offers if offer.zone == disk.zone]
        said = f"{short(disk)} holds earlier results"
        if disk.zone and not there:
            text = f"{said}, and no offer is in {disk.zone}\n  it stays: {costs(disk)}"
            ground.reporter.emit(Note(text=text, level="warning"))
        elif disk.zone:
            ground.reporter.emit(Note(text=f"{said}: a server in {disk.zone} comes first"))
    return sorted(offers, key=lambda offer: offer.zone not in zones)


def list_restored(ground: Ground, server: Server) -> dict[str, Resource]:
    """The kept disks, by id, whose content the server has."""
    lines = ground.state.events(server_id=server.id, kind=RESTORED)
    restored = [msgspec.convert(line.detail["disk"], Resource) for line in lines]
    return {disk.id: disk for disk in restored}


def note_saved(ground: Ground, server: Server) -> None:
    """All of the server's results are home and verified, and so is what its kept disks held."""
    for disk in list_restored(ground, server).values():
        detail = {"disk": msgspec.to_builtins(disk)}
        ground.state.record(SAVED, lab_id=ground.lab_id, server_id=server.id, detail=detail)


def is_saved(ground: Ground, disk: Resource) -> bool:
    """Whether everything on a kept disk is home."""
    lines = ground.state.events(lab_id=ground.lab_id, kind=SAVED)
    return any(line.detail["disk"]["id"] == disk.id for line in lines)


def explained(ground: Ground, error: NotFoundError) -> NotFoundError:
    """Why there is no server to pull from, and what a kept disk has to do with it."""
    known = [one.disk for one in list_kept_disks(ground.state, ground.lab_id)]
    if known:
        error.why = "\n".join(f"its results are on {short(d)}: {costs(d)}" for d in known)
        error.hint = "labctl up && labctl pull"
    return error

"""Kept disks as the ledger knows them: seen without their server, and not known to be gone."""

from __future__ import annotations

import time

import msgspec

from labctl.model import Resource, Value
from labctl.state import State

# Kinds of the ledger's lines about a kept disk.
SEEN, MISSED, REMOVED, RESTORED = "kept", "kept-missed", "removed", "restored"


class KeptDisk(Value, frozen=True):
    """A kept disk as the ledger knows it: as last seen, at `seen_at` (Unix seconds).

    `missed_at` is when the provider last did not show it among the regions that were asked; None
    where it did.
    """

    disk: Resource
    seen_at: float
    missed_at: float | None = None


def list_kept_disks(state: State, lab_id: str | None = None) -> list[KeptDisk]:
    """The kept disks that are not known to be gone, of one lab or of all, the oldest first."""
    found: dict[str, KeptDisk] = {}
    lines = [
        line for kind in (SEEN, MISSED, REMOVED) for line in state.events(lab_id=lab_id, kind=kind)
    ]
    for line in sorted(lines, key=lambda one: one.number):
        disk = msgspec.convert(line.detail["disk"], Resource)
        if line.kind == SEEN:
            found[disk.id] = KeptDisk(disk=disk, seen_at=line.at)
        elif line.kind == REMOVED:
            found.pop(disk.id, None)
        elif disk.id in found:
            found[disk.id] = msgspec.structs.replace(found[disk.id], missed_at=line.at)
    return list(found.values())


def is_expired(disk: Resource) -> bool:
    """Whether it is a kept disk whose time is over, and no server has it any more."""
    expires_at = disk.expires_at
    return expires_at is not None and expires_at < time.time() and not disk.server_id


def has_expired(state: State, lab_id: str, provider: str) -> bool:
    """Whether a disk on record may have to be removed: only its provider can tell.

    One whose content is on the lab's present server goes once that is home.
    """
    server = state.server_of_lab(lab_id)
    lines = state.events(server_id=server.id, kind=RESTORED) if server else []
    attached = {line.detail["disk"]["id"] for line in lines}
    return any(
        is_expired(msgspec.structs.replace(one.disk, server_id=""))
        for one in list_kept_disks(state, lab_id)
        if one.disk.provider == provider and not one.missed_at and one.disk.id not in attached
    )

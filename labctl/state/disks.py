"""Kept disks on record in the ledger: they have outlived their servers, and are not known gone."""

from __future__ import annotations

import time

import msgspec

from labctl.decoding import convert_value
from labctl.model import Resource, Server, Value
from labctl.state import State

# Kinds of the ledger's lines about a kept disk.
SEEN, MISSED, REMOVED, RESTORED = "kept", "kept-missed", "removed", "restored"


# Kind of the ledger's line about a server that was stopped, and keeps its disk.
STOPPED = "stopped"


class StoppedDisk(Value, frozen=True):
    """The disk of a server that was stopped at `at` (Unix seconds).

    `usd_per_month` is 0.0 if the provider showed no price. `until` is when the provider's timer
    removes the server; 0.0 if nothing does.
    """

    at: float
    usd_per_month: float = 0.0
    until: float = 0.0


def find_stopped_disk(state: State, server: Server | None) -> StoppedDisk | None:
    """Find the disk of a server that labctl stopped; None if the server is not stopped."""
    if server is None or server.state != "stopped":
        return None
    lines = state.list_events(server_id=server.id, kind=STOPPED, limit=1)
    if not lines:
        return None
    detail = lines[0].detail
    price, until = detail.get("usd_per_month", 0.0), detail.get("until", 0.0)
    return StoppedDisk(at=lines[0].at, usd_per_month=price, until=until)


class KeptDisk(Value, frozen=True):
    """A kept disk as last seen, at `seen_at` (Unix seconds).

    `missed_at` is when the provider last did not show it in the regions that were searched; None if
    it did.
    """

    disk: Resource
    seen_at: float
    missed_at: float | None = None


def list_kept_disks(state: State, lab_id: str | None = None) -> list[KeptDisk]:
    """List the kept disks that are not known to be gone, of one lab or of all, oldest first."""
    disks: dict[str, KeptDisk] = {}
    lines = [
        line
        for kind in (SEEN, MISSED, REMOVED)
        for line in state.list_events(lab_id=lab_id, kind=kind)
    ]
    for line in sorted(lines, key=lambda entry: entry.number):
        disk = convert_value(line.detail["disk"], Resource)
        if line.kind == SEEN:
            disks[disk.id] = KeptDisk(disk=disk, seen_at=line.at)
        elif line.kind == REMOVED:
            disks.pop(disk.id, None)
        elif disk.id in disks:
            disks[disk.id] = msgspec.structs.replace(disks[disk.id], missed_at=line.at)
    return list(disks.values())


def is_expired(disk: Resource) -> bool:
    """Whether it is a kept disk that has expired and that no server uses anymore."""
    expires_at = disk.expires_at
    return expires_at is not None and expires_at < time.time() and not disk.server_id


def has_expired(state: State, lab_id: str, provider: str) -> bool:
    """Whether a recorded disk at the provider may have to be removed."""
    return provider in list_expired_providers(state, lab_id)


def list_expired_providers(state: State, lab_id: str) -> list[str]:
    """List the providers at which a recorded disk may have to be removed.

    Only its provider knows the current expiry.

    A disk whose content is on the lab's present server does not count: it is removed once that
    content has been downloaded.
    """
    server = state.get_lab_server(lab_id)
    lines = state.list_events(server_id=server.id, kind=RESTORED) if server else []
    attached = {line.detail["disk"]["id"] for line in lines}
    expired = [
        kept.disk.provider
        for kept in list_kept_disks(state, lab_id)
        if is_expired(msgspec.structs.replace(kept.disk, server_id=""))
        and not kept.missed_at
        and kept.disk.id not in attached
    ]
    return list(dict.fromkeys(expired))

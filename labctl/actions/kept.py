"""Results that only a kept disk holds come back: a server near it, mounted, and copied in place."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.actions import Note, Step, disks, runs
from labctl.actions.disks import RESTORED, costs, has_expired, looked, on_record, short
from labctl.actions.ground import Ground
from labctl.errors import BusyError, LabError, NotFoundError
from labctl.model import Offer, Resource, Server
from labctl.providers import Keep
from labctl.retry import retry_on

SAVED = "restored-saved"
ATTACH_S = 120.0
PAUSE_S = 1.0
COPY_S = 12 * 3600.0


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


def restore(ground: Ground, server: Server) -> None:
    """Have on `server` what the lab's kept disks hold and it lacks. Repeated, it changes nothing.

    A disk that cannot be had is told, and stays as it is.
    """
    if not isinstance(ground.provider, Keep):
        return
    made_here = ground.state.events(server_id=server.id, kind="created", limit=1)
    known = on_record(ground.state, ground.lab_id)
    done = _restored(ground, server)
    # Whoever made the server has looked just before.
    if made_here and not [one for one in known if one.disk.id not in done]:
        return
    for disk in look(ground):
        if disk.id in done:
            continue
        try:
            _bring(ground, ground.provider, server, disk)
        except LabError as error:
            said = f"what is on {short(disk)} did not come back: {error.what}"
            text = "\n  ".join(filter(None, [said, error.why, f"it stays: {costs(disk)}"]))
            ground.reporter.emit(Note(text=text, level="warning"))


def pending(ground: Ground, server: Server) -> bool:
    """Whether a kept disk of the lab is on record that this server has not got yet."""
    done = _restored(ground, server)
    known = on_record(ground.state, ground.lab_id)
    return any(one.disk.id not in done and not one.missed_at for one in known)


def _restored(ground: Ground, server: Server) -> dict[str, Resource]:
    lines = ground.state.events(server_id=server.id, kind=RESTORED)
    restored = [msgspec.convert(line.detail["disk"], Resource) for line in lines]
    return {disk.id: disk for disk in restored}


def _bring(ground: Ground, provider: Keep, server: Server, disk: Resource) -> None:
    step = Step(name=f"bringing back what is on {short(disk)}")
    ground.reporter.emit(step)
    device = _attached(provider, server, disk)
    about = {"lab": ground.config.name, "lab_id": ground.lab_id, "device": device}
    reply = ground.remote(server).call("restore", about, timeout_s=COPY_S)
    ground.reporter.emit(msgspec.structs.replace(step, done=True))
    detail = {"disk": msgspec.to_builtins(disk), **reply}
    ground.state.record(RESTORED, lab_id=ground.lab_id, server_id=server.id, detail=detail)
    runs.refresh(ground, server)
    count, edits = len(reply["runs"]), len(reply["edits"])
    came = [
        f"{count} run{'' if count == 1 else 's'} with {reply['files']} files" if count else "",
        f"{edits} edited file{'' if edits == 1 else 's'}" if edits else "",
    ]
    what = " and ".join(filter(None, came)) or "nothing that was not here already"
    text = f"back from {short(disk)}: {what}"
    ground.reporter.emit(Note(text=f"{text}; next: labctl pull" if count or edits else text))


def _attached(provider: Keep, server: Server, disk: Resource) -> str:
    """Its device there. The server that had it may be ending still."""
    policy = retry_on(BusyError, pause_s=PAUSE_S, deadline_s=ATTACH_S)
    return policy(provider.attach_kept, disk, server.id)


def note_saved(ground: Ground, server: Server) -> None:
    """All of the server's results are home and verified, and so is what its kept disks held."""
    for disk in _restored(ground, server).values():
        detail = {"disk": msgspec.to_builtins(disk)}
        ground.state.record(SAVED, lab_id=ground.lab_id, server_id=server.id, detail=detail)


def is_saved(ground: Ground, disk: Resource) -> bool:
    """Whether everything on a kept disk is home."""
    lines = ground.state.events(lab_id=ground.lab_id, kind=SAVED)
    return any(line.detail["disk"]["id"] == disk.id for line in lines)


def explained(ground: Ground, error: NotFoundError) -> NotFoundError:
    """Why there is no server to pull from, and what a kept disk has to do with it."""
    known = [one.disk for one in on_record(ground.state, ground.lab_id)]
    if known:
        error.why = "\n".join(f"its results are on {short(d)}: {costs(d)}" for d in known)
        error.hint = "labctl up && labctl pull"
    return error

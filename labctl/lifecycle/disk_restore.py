"""Results that only a kept disk holds come back: a server near it, mounted, and copied in place."""

from __future__ import annotations

import msgspec

from labctl.errors import BusyError, LabError
from labctl.events import Note, Step
from labctl.model import Resource, Server
from labctl.providers import Keep
from labctl.retry import retry_on
from labctl.runs import runs
from labctl.servers.context import Ground
from labctl.servers.disks import costs, short
from labctl.servers.kept_disks import list_restored, look
from labctl.state.disks import RESTORED, list_kept_disks

ATTACH_S = 120.0
PAUSE_S = 1.0
COPY_S = 12 * 3600.0


def restore(ground: Ground, server: Server) -> None:
    """Have on `server` what the lab's kept disks hold and it lacks. Repeated, it changes nothing.

    A disk that cannot be had is told, and stays as it is.
    """
    if not isinstance(ground.provider, Keep):
        return
    made_here = ground.state.events(server_id=server.id, kind="created", limit=1)
    known = list_kept_disks(ground.state, ground.lab_id)
    done = list_restored(ground, server)
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
    done = list_restored(ground, server)
    known = list_kept_disks(ground.state, ground.lab_id)
    return any(one.disk.id not in done and not one.missed_at for one in known)


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

"""Copy results from a kept disk to the lab's server, which mounts the disk for that."""

from __future__ import annotations

import msgspec

from labctl.errors import LabError
from labctl.events import Note, Step
from labctl.model import Resource, Server
from labctl.runs import runs
from labctl.servers import kept_disks
from labctl.servers.context import LabContext
from labctl.servers.disks import cost_text, get_id_without_region
from labctl.state.disks import RESTORED, list_kept_disks
from labctl.text import add_next
from labctl.wire.codec import to_json
from labctl.wire.files import RESTORE_DISK, RestoreDiskRequest

COPY_S = 12 * 3600.0


def restore(context: LabContext, server: Server) -> None:
    """Copy to `server` what the lab's kept disks hold and it lacks. Idempotent.

    A disk that cannot be attached or read causes a warning, and stays as it is.
    """
    creations = context.state.list_events(server_id=server.id, kind="created", limit=1)
    recorded = list_kept_disks(context.state, context.lab_id)
    restored_ids = kept_disks.list_restored(context, server)
    # Creating the server has just listed the disks.
    if creations and not [kept for kept in recorded if kept.disk.id not in restored_ids]:
        return
    for disk in kept_disks.list_shown_disks(context):
        if disk.id in restored_ids:
            continue
        try:
            _copy_disk(context, server, disk)
        except LabError as error:
            message = f"cannot restore the files on {get_id_without_region(disk)}: {error.what}"
            price = f"the disk is kept: {cost_text(disk)}"
            text = "\n  ".join(filter(None, [message, error.why, price]))
            context.reporter.emit(Note(text=text, level="warning"))


def has_pending_disks(context: LabContext, server: Server) -> bool:
    """Whether the records name a kept disk that was not yet copied to this server."""
    restored_ids = kept_disks.list_restored(context, server)
    recorded = list_kept_disks(context.state, context.lab_id)
    return any(kept.disk.id not in restored_ids and not kept.missed_at for kept in recorded)


def _copy_disk(context: LabContext, server: Server, disk: Resource) -> None:
    step = Step(name=f"restoring files from {get_id_without_region(disk)}")
    context.reporter.emit(step)
    device = kept_disks.attach(context, disk, server)
    request = RestoreDiskRequest(context.config.name, context.lab_id, device)
    reply = context.open_agent(server).call(RESTORE_DISK, request, timeout_s=COPY_S)
    context.reporter.emit(msgspec.structs.replace(step, done=True))
    detail = {"disk": msgspec.to_builtins(disk), **to_json(reply)}
    context.state.record(RESTORED, lab_id=context.lab_id, server_id=server.id, detail=detail)
    runs.refresh(context, server)
    count, edits = len(reply.runs), len(reply.edits)
    parts = [
        f"{count} run{'' if count == 1 else 's'} with {reply.files} files" if count else "",
        f"{edits} edited file{'' if edits == 1 else 's'}" if edits else "",
    ]
    summary = " and ".join(filter(None, parts)) or "nothing new"
    text = f"restored from {get_id_without_region(disk)}: {summary}"
    # A course downloads the results of seats when it ends their servers.
    can_pull = context.subject.kind == "lab" and (count or edits)
    context.reporter.emit(Note(text=add_next(text, "labctl pull") if can_pull else text))

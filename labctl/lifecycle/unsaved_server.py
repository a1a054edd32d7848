"""A server with files that exist nowhere else cannot be removed: stop it, and keep its disk."""

from __future__ import annotations

import time

from labctl.errors import LabError, PolicyError
from labctl.errors.subject import Subject, Text
from labctl.model import Server
from labctl.servers import disk_retention, end_server, kept_disks, power
from labctl.servers.context import LabContext
from labctl.text import dollars_text, price_or_free_text

DAY_S = 86_400
# How long a disk with unsaved results is kept; the watchdog uses the same time.
KEPT_S = 30 * DAY_S


class UnsavedHomeError(PolicyError):
    """A server ended or stopped, and files of its home directory may exist nowhere else."""


def pull_again(subject: Subject) -> str:
    """Return the commands that save what is on the server, or give it up."""
    if subject.kind == "lab":
        saving = "labctl up && labctl pull"
        return f"{saving}\nlabctl down --discard   # instead, to delete the unsaved files"
    return f"{subject.down}\n{subject.down} --discard   # deletes unsaved results"


def copy_home(subject: Subject) -> str:
    """Return the commands where only the disk was kept: `up` restores results, and nothing else."""
    is_lab = subject.kind == "lab"
    up = "labctl up && labctl pull" if is_lab else subject.up
    remove = "labctl orphans --terminate" if is_lab else "labctl orphans --terminate --kept-too"
    return (
        f"{up}   # restores the results\n{subject.ssh('lsblk')}   "
        "# then mount the kept disk and copy the files of the home directory\n"
        f"{remove}   # removes the disk, which a down does not"
    )


def stop_and_keep_disk(
    context: LabContext,
    server: Server,
    error: LabError,
    *,
    hint: Text = pull_again,
    home_is_saved: bool,
) -> PolicyError:
    """Stop the server but keep its disk; return the error that tells the user both.

    Without `home_is_saved`, the disk may have files of the home directory that exist nowhere else,
    also where the server could not be reached to list them. The error is an UnsavedHomeError then,
    and only `orphans --terminate` removes the disk before it expires.
    """
    context.connections.close(server)
    outcome = _stop_server(context, server)
    if not outcome and (outcome := _keep_disk(context, server, home_is_saved=home_is_saved)):
        hint = hint if home_is_saved else copy_home
    if not outcome:
        price = price_or_free_text(server.offer.price_usd_per_hour)
        outcome = f"the server is still running, unchanged ({price})"
    refusal = PolicyError if home_is_saved else UnsavedHomeError
    return refusal(
        lambda subject: (
            f"{context.name_for(subject)} was not removed: not everything on it could be saved"
        ),
        why="\n".join(filter(None, [error.what, error.why, outcome])),
        hint=hint,
        subject=context.subject,
    )


def _stop_server(context: LabContext, server: Server) -> str:
    """Stop the server and say so in a sentence; "" if this server cannot be stopped."""
    try:
        power.stop_server(context, server, keep_until=time.time() + KEPT_S)
    except power.CannotStopError:
        return ""
    return "the server was stopped and its disk kept"


def _keep_disk(context: LabContext, server: Server, *, home_is_saved: bool) -> str:
    """Terminate the server but keep its disk, and say so; "" if the provider cannot keep disks."""
    disks = disk_retention.keep_disk(context, server, time.time() + KEPT_S)
    if not disks:
        return ""
    if not home_is_saved:
        kept_disks.note_home(context, server, disks)
    end_server.remove(context, server, keep_disks=True)
    prices = [f"{disk.id} at {dollars_text(disk.price_usd_per_month)} a month" for disk in disks]
    days = KEPT_S // DAY_S
    return f"the server was terminated and its disk kept for {days} days: {', '.join(prices)}"

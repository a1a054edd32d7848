"""What `labctl down` and `labctl run --down` print: what was removed, and what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.cli.browser import relative_path
from labctl.cli.exit_codes import clean
from labctl.cli.wrapping import print_message
from labctl.config.member_ids import list_lab_ids
from labctl.errors import BusyError
from labctl.lazy import lazy_imports
from labctl.text import add_next, count_text, list_text

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.lifecycle.down import DownResult
    from labctl.model import Resource

with lazy_imports(__name__):
    from labctl.servers import adoption, disks, job_queue


def is_billing(result: DownResult) -> bool:
    """Whether a server still exists or a resource still costs money."""
    billing = [one for one in result.leftovers if one.price_usd_per_month > 0]
    return bool(result.servers_left or billing)


def find_exit_code(result: DownResult) -> int:
    """Return the exit code: whether anything may cost money, and whether that is known."""
    if is_billing(result):
        return 1
    return BusyError.exit_code if result.failures else 0


def print_down(lab: Lab, result: DownResult, *, err: bool = False) -> None:
    """Print what was downloaded and removed and what is left; with `err` to standard error."""
    if result.unchecked:
        print_message(f"{lab.config.name} has no server on record; nothing was removed.", err=err)
        print_message(f"Its machines could not be checked: {result.unchecked}", err=err)
        print_message(
            "If an interrupted `labctl up` leased one of them, the lease expires by itself.",
            err=err,
        )
        return
    if result.dropped:
        _print_dropped(result, err=err)
        return
    if result.pulled_files or result.saved_edits:
        counts = (
            (result.pulled_files, "file", "runs"),
            (result.saved_edits, "edited file", "server-edits"),
        )
        parts = [
            f"{_count_files(count, name)} to {clean(relative_path(lab.config.root / place))}/"
            for count, name, place in counts
            if count
        ]
        print_message(f"downloaded {', '.join(parts)}", err=err)
    if result.home_files:
        root = lab.config.root
        places = list_text(
            [f"{clean(relative_path(root / name))}/" for name in result.home_directories]
        )
        count = _count_files(result.home_files)
        print_message(f"downloaded {count} from the home directory to {places}", err=err)
    print_message(describe_removal(lab, result), err=err)
    for server in result.servers_left:
        print_message(f"STILL THERE: {server.id} ({server.state})")
    for resource in [one for one in result.leftovers if one.kind != "cache"]:
        print_message(_describe_leftover(resource), err=err)
    if any(resource.expires_at for resource in result.leftovers):
        print_disk_commands(err=err)
    for name, why in result.failures.items():
        text = f"{name} could not be asked what the lab has left there: {why}"
        next_ = f"labctl down\nlabctl orphans --provider {name}"
        print_message(clean(add_next(text, next_)), err=err)
    if find_exit_code(result) == 0:
        caches = [one for one in result.leftovers if one.kind == "cache"]
        print_message(_describe_rest(lab), err=err)
        if caches:
            print_message(
                f"Image caches kept for the next up: {len(caches)} (labctl orphans)", err=err
            )


def _describe_rest(lab: Lab) -> str:
    """Say that nothing of the lab is left, and how many servers other labs have on record."""
    own_ids = list_lab_ids(lab.id)
    others = [one for one in lab.context.state.list_servers() if one.lab_id not in own_ids]
    if not others:
        return "Nothing is left running or billing."
    count = count_text(len(others), "server")
    return (
        f"Nothing of {lab.config.name} is left running or billing. "
        f"Other labs have {count}: labctl cost --all"
    )


def _print_dropped(result: DownResult, *, err: bool) -> None:
    reason = "has another host key" if result.has_other_key else "could not be reached"
    key = ", and the host key that you confirmed" if result.has_other_key else ""
    again = "To use the machine again: labctl up   (shows the new fingerprint)"
    for line in (
        f"{result.dropped} {reason}, so nothing was sent to it.",
        f"Removed on your computer: its record{key}.",
        "NOT removed: your files and runs on it. If your lease still exists, it ends by itself.",
        again if result.has_other_key else "To use another machine: labctl up",
    ):
        print_message(line, err=err)


def describe_removal(lab: Lab, result: DownResult) -> str:
    """Say which server was removed. A leased machine stays on, and only its lease has ended."""
    if not result.removed:
        return f"{lab.config.name} had no server"
    if adoption.is_leased(lab.context):
        return f"ended the lease of {result.removed}; the machine stays on"
    if job_queue.has_job_queue(lab.context):
        return f"removed the lab's files and jobs from {result.removed}"
    return f"removed {result.removed}"


def _count_files(count: int, name: str = "file") -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def print_disk_commands(*, err: bool = False) -> None:
    """Print how to use and how to delete the disks that outlived their servers."""
    print_message("  labctl up && labctl pull                download what is on it", err=err)
    print_message("  labctl orphans --terminate --kept-too   delete it with its data", err=err)


def _describe_leftover(resource: Resource) -> str:
    name = disks.get_id_without_region(resource) if resource.expires_at else resource.id
    note = f" ({resource.note})" if resource.note and not resource.expires_at else ""
    return f"left: {resource.kind} {name}: {disks.cost_text(resource)}{note}"

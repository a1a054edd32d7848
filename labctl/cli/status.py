"""The command status."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from labctl.cli import run_table
from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option, open_lab
from labctl.cli.tables import age_text, print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.errors import BusyError, LabError
from labctl.lazy import lazy_imports
from labctl.text import (
    bytes_text,
    dollars_text,
    duration_text,
    price_or_free_text,
    price_text,
)

if TYPE_CHECKING:
    from labctl.lifecycle.lab_status import InterruptedDown, LabStatus
    from labctl.model import Server
    from labctl.state.disks import KeptDisk
    from labctl.wire.watchdog import MirrorStateRecord, WatchRecord

with lazy_imports(__name__):
    from labctl.servers import adoption, watch_reports
    from labctl.servers import disks as server_disks


# how long before a server's end `status` says when the runs will be stopped
SHOWN_WIND_DOWN_S = 900.0
_EXECUTORS = {
    "docker": "Docker containers",
    "process": "plain processes (executor: process)",
    "slurm": "jobs of Slurm",
}
_STOP_REASONS = {"ttl": "its ttl ended", "budget": "its budget was spent", "idle": "it was idle"}


@click.command("status")
@click.option("--refresh", "-r", is_flag=True, help="Query the provider and the server now.")
@click.option("--all", "all_", is_flag=True, help="List all runs, not only the newest ones.")
@click.option("--why", is_flag=True, help="List the watchdog's last decisions and their reasons.")
@json_option
@click.pass_context
def status_command(ctx: click.Context, refresh: bool, all_: bool, why: bool, json_: bool) -> None:
    """Show the server, its runs, time limits and cost.

    It lists the runs that have not ended and the newest of the others; --all lists all of them. It
    shows the last known state. With --refresh or --why, if a keeper watches over the lab, or if a
    course may have a server for it, labctl queries the provider and the server first.

    \b
    labctl status --refresh
    labctl status --why
    """
    status, is_current = _read_status(ctx, refresh or why, why, json_)
    problem = status.provider_problem
    exit_code = BusyError.exit_code if problem and (refresh or why) else 0
    if json_:
        print_json(status)
        ctx.exit(exit_code)
    if problem:
        print_message(f"showing what is known: {clean(problem)}")
        is_current = status.reachable is True
    server: Server | None = status.server
    if server is None and status.joinable:
        _print_joinable(status.lab, status.joinable, status.now)
    elif server is None:
        _print_no_server(status.lab, status.unfinished_up, status.last_end)
        _print_others(status.servers, status.count)
    else:
        _print_server(status, server, is_current)
    if status.keeper:
        click.echo(f"  watched by the keeper at {status.keeper}")
    _print_move(status.moving)
    _print_kept(status.kept)
    if why and server is not None:
        _print_decisions(watch_reports.parse_watch(status.watch), status.is_unguarded)
    elif status.runs and not why:
        runs, hidden = run_table.select_runs(status.runs, server, all_)
        run_table.print_runs(runs, server, status)
        if hidden:
            older = "1 older run" if hidden == 1 else f"{hidden} older runs"
            click.echo(f"and {older}: labctl status --all")
    ctx.exit(exit_code)


def _read_status(
    ctx: click.Context, refresh: bool, why: bool, json_: bool
) -> tuple[LabStatus, bool]:
    """Return the status, and whether the provider was queried for it."""
    lab = open_lab(ctx, quiet=json_, record_only=not refresh, skips_faults=True)
    if refresh:
        try:
            return lab.status(refresh=True, why=why), True
        except BusyError as error:
            return msgspec.structs.replace(lab.status(), provider_problem=error.what), False
    recorded = lab.status()
    if not lab.keeper and (recorded.server is not None or not lab.can_join_server):
        return recorded, False
    # A keeper acts on the lab, or the user's other device has a server: the record does not tell.
    try:
        lab = open_lab(ctx, quiet=json_)
        return lab.status(refresh=True), True
    except LabError as error:
        print_message(f"showing the last known state: {clean(error.what)}")
        return msgspec.structs.replace(lab.status(), keeper=lab.keeper), False


def _print_no_server(lab: str, has_unfinished_up: bool, last_end: str) -> None:
    if has_unfinished_up:
        text = f"{lab}: no server known, but an interrupted labctl up may have created one"
        print_message(text, err=False)
        click.echo("  labctl up      continue")
        click.echo("  labctl down    remove the server if it exists")
        return
    click.echo(f"{lab}: no server\n  next: labctl up")
    if last_end:
        print_message(f"  its last server ended: {last_end}", err=False)


def _print_joinable(lab: str, server: Server, now: float) -> None:
    """Print the running server that another device, lab or teammate holds."""
    price = server.offer.price_usd_per_hour
    parts = [
        clean(server.offer.type),
        price_text(price) if price else "free",
        f"up {duration_text(now - server.created_at)}",
    ]
    text = f"{lab}: your server is running, but this lab does not use it yet"
    print_message(f"{text} ({', '.join(parts)})", err=False)
    click.echo("  labctl up      use it here too")


def _print_move(servers: Sequence[Server]) -> None:
    """Print the servers of an unfinished move, and what ends it."""
    for server in servers:
        part = "a new server" if server.moving == "next" else "the former server"
        price = price_or_free_text(server.offer.price_usd_per_hour)
        text = f"an unfinished move has {part}: {server.provider} {server.offer.type}, {price}"
        print_message(f"  {clean(text)}", err=False, fg="yellow")
    if servers:
        click.echo("  labctl move    continues it")
    if any(server.moving == "next" for server in servers):
        click.echo("  labctl move --cancel    removes the new server")


def _print_kept(disks: Sequence[KeptDisk]) -> None:
    if disks:
        for disk in disks:
            print_message(f"  {clean(server_disks.describe_kept_disk(disk))}", err=False)


def _print_server(status: LabStatus, server: Server, is_current: bool) -> None:
    known = "being removed" if server.state == "ending" else server.state
    state = known if is_current else f"{known} (last known)"
    if status.reachable is False:
        state = "NOT REACHABLE"
    kind = clean(f"{server.provider} {server.offer.type}")
    print_message(f"{clean(server.alias)}: {state}, {kind}", err=False)
    if status.why:
        print_message(f"  {clean(status.why)}", err=False)
    if status.reachable is False:
        _print_reconnection(server, has_several=bool(status.servers))
    servers: list[Server] = [server, *status.servers]
    price = sum(one.offer.price_usd_per_hour for one in servers)
    own_usd = sum(
        one.offer.price_usd_per_hour * (status.now - one.created_at) / 3600 for one in servers
    )
    cost = _cost_text(status.cost_usd, own_usd, price) if price else "free"
    up_s = status.now - server.created_at
    up = "" if server.state == "stopped" else f"up {duration_text(up_s)}, "
    print_message(f"  {up}{cost}", err=False)
    if server.state == "ending":
        click.echo("  next: labctl down")
        return
    runs = _EXECUTORS.get(status.executor, f"jobs of {clean(status.executor)}")
    click.echo(f"  runs are {runs}")
    _print_limits(status, price, is_stopped=server.state == "stopped")
    interrupted: InterruptedDown | None = status.interrupted_down
    if interrupted is not None:
        run = f" while it followed {interrupted.run}" if interrupted.run else ""
        text = f"`labctl run --down` was interrupted ({interrupted.why}){run}"
        removed = "the servers" if status.servers else "the server"
        ends = "end your lease" if adoption.is_leased_by(server.provider) else f"remove {removed}"
        print_message(f"  {clean(text)}; to {ends}: labctl down", err=False)
    if server.state == "stopped":
        if status.stop_reasons:
            reasons = " or ".join(_STOP_REASONS.get(each, each) for each in status.stop_reasons)
            print_message(f"  its watchdog stopped it: {reasons}", err=False)
        disk = status.stopped
        kept = "its disk is kept, with everything on it"
        text = server_disks.describe_stopped_disk(disk) if disk else kept
        print_message(f"  {text}; to use it: labctl start", err=False)
        return
    _print_others(status.servers, status.count)
    if status.disk:
        click.echo(f"  disk {bytes_text(status.disk.free_bytes)} free")
    click.echo(f"  ssh {server.alias}")


def _print_others(servers: Sequence[Server], count: int) -> None:
    """Print the states of the servers beside the first; lab.yaml asks for `count` in all."""
    for server in servers:
        price = server.offer.price_usd_per_hour
        cost = f", {price_text(price)}" if price else ""
        text = f"{server.alias}: {server.state}, {server.offer.type}{cost}"
        print_message(f"  with {clean(text)}", err=False)
    if len(servers) >= count:
        text = f"lab.yaml asks for {count} of these servers; to remove all: labctl down"
        print_message(f"  {text}", err=False, fg="yellow")


def _cost_text(spent_usd: float, own_usd: float, price: float) -> str:
    """Write what the lab has cost, and whether that includes servers before this one."""
    earlier = " with earlier servers," if spent_usd - own_usd >= 0.01 else ""
    return f"{dollars_text(spent_usd)} so far{earlier} at {price_text(price)}"


def _print_reconnection(server: Server, *, has_several: bool) -> None:
    """Print what to do about a server that does not answer."""
    down, action = "labctl down", "remove the servers" if has_several else "remove the server"
    if adoption.is_leased_by(server.provider):
        # A plain `down` would first download its results.
        down, action = "labctl down --discard", "end your lease, without its results"
    click.echo(f"  {'labctl up':<{len(down)}}    connect again, or say why that fails")
    click.echo(f"  {down}    {action}")


def _print_limits(status: LabStatus, price: float, *, is_stopped: bool) -> None:
    """Print the time and money left as the watchdog reported them, and what it cannot do.

    Of the clocks of a stopped server only the ttl goes on.
    """
    watch, clocks = watch_reports.parse_watch(status.watch), status.clocks
    if watch is None or status.watched_at is None:
        if clocks is not None and any((clocks.ttl_s, clocks.idle_s, clocks.budget_usd)):
            click.echo("  time left is unknown\n  next: labctl status --refresh")
        return
    report_age_s = status.now - status.watched_at
    limits = [
        f"{name} {duration_text(left_s - report_age_s)} left"
        for name, left_s in (("ttl", watch.ttl_left_s), ("idle", watch.idle_left_s))
        if left_s is not None and not (is_stopped and (name != "ttl" or left_s < report_age_s))
    ]
    if watch.budget_left_s is not None and price and not is_stopped:
        dollars = (watch.budget_left_s - report_age_s) / 3600 * price
        limits.append(f"{dollars_text(dollars)} left")
    if limits:
        age = age_text(status.watched_at, status.now)
        reported = f" (reported {age} ago)" if report_age_s > 5 else ""
        print_message(f"  {', '.join(limits)}{reported}", err=False)
    if is_stopped:
        return
    if watch.ends_by in ("ttl", "budget"):
        _print_wind_down(watch, report_age_s)
    if not watch.alive:
        click.echo(click.style("  its watchdog is not running", fg="red"))
        click.echo("  next: labctl up")
    for number, activity in enumerate(watch.busy[:3]):
        click.echo(f"  {' ' * 9 if number else 'not idle:'} {clean(activity)}")
    if watch.mirror:
        _print_mirror(watch.mirror, status.now)
    for problem in watch.cannot or ():
        print_message(f"  {clean(problem)}", err=False, fg="yellow")


def _print_wind_down(watch: WatchRecord, report_age_s: float) -> None:
    """Print when the watchdog will stop the runs, if that is soon and well before the limit."""
    limit_s = watch.ttl_left_s if watch.ends_by == "ttl" else watch.budget_left_s
    ends_in_s, limit_s = watch.ends_in_s or 0.0, limit_s or 0.0
    if watch.ending or ends_in_s > SHOWN_WIND_DOWN_S or limit_s - ends_in_s < 5:
        return
    left = duration_text(max(0.0, ends_in_s - report_age_s))
    click.echo(f"  it stops runs, saves results and ends in {left}, to be done in time")


def _print_mirror(mirror: MirrorStateRecord, now: float) -> None:
    """Print when the store was last complete, or why it is not."""
    when = f"{age_text(mirror.at, now)} ago" if mirror.at else "never"
    if not mirror.failed:
        click.echo(f"  mirrored {when}")
        return
    behind = f", {bytes_text(mirror.behind_bytes)} behind" if mirror.behind_bytes else ""
    text = f"  not mirrored (last: {when}{behind}), retrying: {clean(mirror.failed)}"
    print_message(text, err=False, fg="yellow")


def _print_decisions(watch: WatchRecord | None, is_unguarded: bool) -> None:
    """Print the decisions in a table whose last column wraps, because each word of it counts."""
    if watch is None:
        text = "No report of the watchdog is known."
        if is_unguarded:
            text = "This server has no watchdog. It gets one with its first limit: "
            text += "labctl up --idle 30m"
        print_message(f"\n{text}", err=False)
        return
    rows = [
        (time.strftime("%m-%d %H:%M:%S", time.localtime(each.at)), each.what, each.why)
        for each in watch.decisions
    ]
    click.echo()
    if rows:
        print_table(rows, ("TIME", "DECISION", "WHY"), cut=False)
    else:
        click.echo("The watchdog has taken no action.")

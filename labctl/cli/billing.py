"""The commands extend, cost and down: what is rented and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from labctl.cli.down_output import find_exit_code, print_disk_commands, print_down
from labctl.cli.exit_codes import clean
from labctl.cli.options import (
    DISCARD,
    FORGET,
    json_option,
    open_lab,
    yes_option,
)
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.config import parse_duration
from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.text import (
    dollars_text,
    duration_text,
    elapsed_text,
    optional_text,
    price_or_free_text,
)
from labctl.wire.codec import to_json

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.servers.cost import Costs, RunCost, ServerCost
    from labctl.state.disks import KeptDisk
    from labctl.wire.watchdog import WatchRecord

with lazy_imports(__name__):
    from labctl.lifecycle import extend, reconcile
    from labctl.servers import cost
    from labctl.servers import disks as server_disks
    from labctl.wire import watchdog

IDLE_NOTE = (
    "IDLE is known only for servers that have had a limit (ttl, budget or idle): their watchdog "
    "measures it."
)


@click.command("extend")
@click.argument("span")
@json_option
@click.pass_context
def extend_command(ctx: click.Context, span: str, json_: bool) -> None:
    """Extend the server's lifetime by SPAN, up to max_ttl and within the budget.

    \b
    labctl extend 30m
    """
    try:
        span_s = parse_duration(span)
    except ValueError as error:
        raise UsageError(str(error), hint="labctl extend 30m") from None
    watch = extend.extend(open_lab(ctx, quiet=json_).context, span_s)
    if json_:
        print_json({"watch": to_json(watch) if watch else {}})
    else:
        print_message(_describe_end(watch or watchdog.WatchRecord()), err=False)


def _describe_end(watch: WatchRecord) -> str:
    """Say in one sentence when the server stops at the latest, and what can stop it sooner."""
    end_s, text = watch.ttl_left_s, ""
    if end_s is not None:
        text = f"The server now stops in {duration_text(end_s)}"
    if watch.budget_left_s is not None and (end_s is None or watch.budget_left_s < end_s):
        ttl = "" if end_s is None else f" (ttl: {duration_text(end_s)})"
        end_s = watch.budget_left_s
        text = f"The server stops in {duration_text(end_s)}, when its budget is spent{ttl}"
    idle_s = watch.idle_left_s
    if idle_s is None or (end_s is not None and idle_s >= end_s):
        return f"{text or 'No limit is set: only labctl down stops the server'}."
    # Even a server that stays idle from now on is not stopped before.
    soonest = f"in {duration_text(idle_s)} at the soonest."
    if not text:
        return f"The server stops once it is idle, {soonest}"
    return f"{text}. If it is idle, it stops earlier, {soonest}"


@click.command("cost")
@click.option("--all", "all_", is_flag=True, help="Show every lab that this machine has on record.")
@json_option
@click.pass_context
def cost_command(ctx: click.Context, all_: bool, json_: bool) -> None:
    """Show the time and cost of each server and run, from the ledger.

    Disks and traffic are not included. Unknown amounts are shown as a question mark, with a reason
    below. A terminal shows the columns that have a value, and if it is too narrow for them, the
    first ones; a pipe and --json get all.

    \b
    labctl cost
    labctl cost --all --json
    """
    lab = open_lab(ctx, quiet=json_, record_only=True, needs_file=not all_, skips_faults=True)
    if lab.keeper:
        reconcile.merge_keeper_records(lab.context)
    lab_costs = cost.compute_costs(lab.context, every_lab=all_)
    if json_:
        print_json({"costs": lab_costs})
    else:
        _print_costs(lab_costs, all_)


def _print_costs(costs: Costs, every_lab: bool) -> None:
    if not costs.servers:
        click.echo("No server on record.")
        _print_kept(costs.kept)
        return
    rows = [
        (
            _id_without_region(server.server_id),
            *([server.lab or "?"] if every_lab else []),
            server.type,
            f"{duration_text(server.hours * 3600)}{', up' if server.running else ''}",
            optional_text(server.price_usd_per_hour, price_or_free_text, "?"),
            _cost_text(server.cost_usd),
            (optional_text(server.spot_saved_usd, dollars_text, "?") if server.spot else "-"),
            "-" if server.idle_share is None else f"{server.idle_share:.0%}",
        )
        for server in costs.servers
    ]
    labs = ["LAB"] if every_lab else []
    headings = ("SERVER", *labs, "TYPE", "TIME", "PRICE", "COST", "SAVED", "IDLE")
    optional = ("IDLE", "SAVED", "TYPE", "PRICE", "TIME")
    unneeded = _list_unneeded_columns(costs.servers)
    shown = print_table(rows, headings, optional=optional, unneeded=unneeded)
    _print_server_notes([server for server in costs.servers if not _is_free(server)], shown)
    if costs.runs:
        click.echo()
        _print_run_costs(costs.runs)
    partial = "" if costs.complete else " without unknown amounts (?)"
    saved = f"; spot saved {dollars_text(costs.spot_saved_usd)}" if costs.spot_saved_usd else ""
    click.echo(f"\ntotal{partial}: {_cost_text(costs.total_usd)}{saved}")
    _print_kept(costs.kept)


def _list_unneeded_columns(servers: Sequence[ServerCost]) -> tuple[str, ...]:
    """List the columns that say nothing of any of these servers."""
    is_empty = {
        "PRICE": all(map(_is_free, servers)),
        "SAVED": not any(server.spot for server in servers),
        "IDLE": all(server.idle_share is None for server in servers),
    }
    return tuple(heading for heading, empty in is_empty.items() if empty)


def _is_free(server: ServerCost) -> bool:
    return server.price_usd_per_hour == 0


def _print_server_notes(servers: Sequence[ServerCost], shown: Sequence[str]) -> None:
    """Print what is unknown about servers that cost money."""
    if "IDLE" in shown and any(server.idle_share is None for server in servers):
        print_message(IDLE_NOTE, err=False)
    for server in servers:
        if server.note:
            note = f"{_id_without_region(server.server_id)}: {server.note}"
            print_message(clean(note), err=False)


def _print_run_costs(runs: Sequence[RunCost]) -> None:
    rows = [
        (
            run.run_id,
            _name_servers(run),
            elapsed_text(run.hours * 3600),
            _cost_text(run.cost_usd),
        )
        for run in runs
    ]
    unneeded = () if any(run.cost_usd != 0 for run in runs) else ("COST",)
    headings = ("RUN", "SERVER", "TIME", "COST")
    print_table(rows, headings, optional=("SERVER", "TIME"), unneeded=unneeded)


def _name_servers(run: RunCost) -> str:
    earlier = len(run.earlier_server_ids)
    return f"{_id_without_region(run.server_id)}{f' and {earlier} before it' if earlier else ''}"


def _cost_text(usd: float | None) -> str:
    return "?" if usd is None else dollars_text(usd) if usd else "free"


def _print_kept(disks: Sequence[KeptDisk]) -> None:
    """Print the disks that outlived their servers, their price, and how to use or remove them."""
    for disk in disks:
        print_message(clean(server_disks.describe_kept_disk(disk)), err=False)
    if disks:
        print_disk_commands()


def _id_without_region(server_id: str) -> str:
    """Shorten an id for a table; it is unique without the region too."""
    return server_id.partition(".")[0]


@click.command("down")
@DISCARD
@FORGET
@yes_option
@json_option
@click.pass_context
def down_command(ctx: click.Context, discard: bool, forget: bool, yes: bool, json_: bool) -> None:
    """Cancel active runs, download new results, remove the server, and list what remains.

    Exits with 1 if the server still exists or a resource still costs money, and with 75 if a
    provider that the lab has used could not be asked.

    \b
    labctl down
    labctl down --yes
    """
    lab = open_lab(ctx, yes=yes, quiet=json_, skips_faults=True)
    if forget:
        _forget(lab, json_)
        return
    result = lab.down(discard=discard)
    if json_:
        print_json(result)
    else:
        print_down(lab, result)
    ctx.exit(find_exit_code(result))


def _forget(lab: Lab, json_: bool) -> None:
    names = lab.forget().names
    if json_:
        print_json({"forgotten": names})
        return
    for name in names:
        click.echo(f"forgotten: {name}")
    click.echo("Anything that still exists keeps billing.")

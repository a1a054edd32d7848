"""The commands offers, extend, cost and down: what is rented and what it costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from labctl.cli.down_output import is_billing, print_disk_commands, print_down
from labctl.cli.exit_codes import clean
from labctl.cli.options import (
    DISCARD,
    FORGET,
    json_option,
    need_options,
    open_lab,
    yes_option,
)
from labctl.cli.screen import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.config import parse_duration
from labctl.errors import NoOfferError, UsageError
from labctl.events import report_wait
from labctl.lazy import lazy_imports
from labctl.text import (
    bytes_text,
    dollars_text,
    duration_text,
    elapsed_text,
    optional_text,
    price_or_free_text,
    price_range_text,
    price_text,
)
from labctl.wire.codec import to_json

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Offer
    from labctl.servers.cost import Costs, RunCost
    from labctl.state.disks import KeptDisk
    from labctl.wire.watchdog import WatchRecord

with lazy_imports(__name__):
    from labctl.lifecycle import extend, reconcile
    from labctl.servers import cost
    from labctl.servers import disks as server_disks
    from labctl.wire import watchdog

MAX_OFFERS_SHOWN = 20
IDLE_NOTE = (
    "IDLE is known only for servers that have had a limit (ttl, budget or idle): their watchdog "
    "measures it."
)


@click.command("offers")
@need_options
@click.option("--all", "all_", is_flag=True, help=f"List more than the best {MAX_OFFERS_SHOWN}.")
@json_option
@click.pass_context
def offers_command(ctx: click.Context, /, all_: bool, json_: bool, **overrides: str) -> None:
    """List the servers that the provider offers for this need, the best first, with prices.

    \b
    labctl offers --gpu any --min-gpu-memory 16GB --max-price 1.50
    """
    lab = open_lab(ctx, quiet=json_, overrides=overrides, needs_file=False)
    context = lab.context
    with report_wait(context.reporter, f"looking for a server ({context.provider.name})"):
        offers = context.provider.offers(lab.config.server.need)
    if json_:
        print_json({"offers": offers})
    elif offers:
        _print_offers(offers if all_ else offers[:MAX_OFFERS_SHOWN], len(offers))
    if not offers:
        raise NoOfferError(
            f"{context.provider.name} has no server that fits this need", hint="labctl config"
        )


def _print_offers(offers: Sequence[Offer], total: int) -> None:
    has_free = any(offer.all_gpus for offer in offers)
    rows = [
        (
            offer.type,
            _format_gpu(offer),
            *((_format_free_gpus(offer),) if has_free else ()),
            offer.zone or "-",
            price_or_free_text(offer.price_usd_per_hour),
            _week_range_text(offer),
            _list_price_text(offer),
            _market_text(offer),
        )
        for offer in offers
    ]
    free = ("FREE GPUS",) if has_free else ()
    headings = ("TYPE", "GPU", *free, "ZONE", "PRICE", "7 DAYS", "LIST", "MARKET")
    # The market names the discount too, and the type implies the GPU.
    print_table(rows, headings, optional=("LIST", "7 DAYS", "ZONE", "GPU"))
    oldest = min((offer.priced_at for offer in offers if offer.priced_at), default=0.0)
    notes = [f"prices {duration_text(time.time() - oldest)} old"] if oldest else []
    notes += [f"and {total - len(offers)} more: --all"] if total > len(offers) else []
    if notes:
        print_message("; ".join(notes))


def _format_gpu(offer: Offer) -> str:
    if not offer.gpu_count:
        return "-"
    count = f"{offer.gpu_count}x " if offer.gpu_count > 1 else ""
    memory = bytes_text(offer.gpu_memory_bytes) if offer.gpu_memory_bytes else ""
    return f"{count}{offer.gpu_name} {memory}".rstrip()


def _format_free_gpus(offer: Offer) -> str:
    return f"{offer.free_gpus} of {offer.all_gpus}" if offer.all_gpus else "-"


def _list_price_text(offer: Offer) -> str:
    return optional_text(offer.on_demand_usd_per_hour or None, price_text)


def _week_range_text(offer: Offer) -> str:
    low, high = offer.week_low_usd_per_hour, offer.week_high_usd_per_hour
    return price_range_text(low, high) if low is not None and high is not None else "-"


def _market_text(offer: Offer) -> str:
    """Write "on demand", or "spot" with its discount from the list price."""
    if not offer.spot:
        return "on demand" if offer.price_usd_per_hour else "-"
    list_price = offer.on_demand_usd_per_hour
    return f"spot -{1 - offer.price_usd_per_hour / list_price:.0%}" if list_price else "spot"


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
    held = f"if it is idle, but not in the next {duration_text(idle_s)}"
    return f"{text}, or sooner {held}." if text else f"The server stops only {held}."


@click.command("cost")
@click.option("--all", "all_", is_flag=True, help="Show every lab that this machine has on record.")
@json_option
@click.pass_context
def cost_command(ctx: click.Context, all_: bool, json_: bool) -> None:
    """Show the time and cost of each server and run, from the ledger.

    Disks and traffic are not included. Unknown amounts are shown as a question mark, with a reason
    below. A terminal that is too narrow for all columns shows the first ones; a pipe and --json get
    all.

    \b
    labctl cost
    labctl cost --all --json
    """
    lab = open_lab(ctx, quiet=json_, record_only=True, needs_file=not all_)
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
    shown = print_table(rows, headings, optional=("IDLE", "SAVED", "TYPE", "PRICE", "TIME"))
    if "IDLE" in shown and any(server.idle_share is None for server in costs.servers):
        print_message(IDLE_NOTE, err=False)
    for server in costs.servers:
        if server.note:
            note = f"{_id_without_region(server.server_id)}: {server.note}"
            print_message(clean(note), err=False)
    if costs.runs:
        click.echo()
        runs = [
            (
                run.run_id,
                _name_servers(run),
                elapsed_text(run.hours * 3600),
                _cost_text(run.cost_usd),
            )
            for run in costs.runs
        ]
        print_table(runs, ("RUN", "SERVER", "TIME", "COST"), optional=("SERVER", "TIME"))
    partial = "" if costs.complete else " without unknown amounts (?)"
    saved = f"; spot saved {dollars_text(costs.spot_saved_usd)}" if costs.spot_saved_usd else ""
    click.echo(f"\ntotal{partial}: {_cost_text(costs.total_usd)}{saved}")
    _print_kept(costs.kept)


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

    Exits with 1 if the server still exists or a resource still costs money.

    \b
    labctl down
    labctl down --yes
    """
    lab = open_lab(ctx, yes=yes, quiet=json_)
    if forget:
        _forget(lab, json_)
        return
    result = lab.down(discard=discard)
    if json_:
        print_json(result)
    else:
        print_down(lab, result)
    ctx.exit(1 if is_billing(result) else 0)


def _forget(lab: Lab, json_: bool) -> None:
    names = lab.forget().names
    if json_:
        print_json({"forgotten": names})
        return
    for name in names:
        click.echo(f"forgotten: {name}")
    click.echo("Anything that still exists keeps billing.")

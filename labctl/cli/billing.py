"""offers, cost, extend, down, orphans: what is decided and what is paid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.options import json_option, need_options, open_lab, yes_option

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Offer, Resource
    from labctl.servers.cost import Costs
    from labctl.servers.leftovers import Orphans
    from labctl.state.disks import KeptDisk

MOST_SHOWN = 20


@click.command("offers")
@need_options
@click.option("--all", "all_", is_flag=True, help=f"More than the best {MOST_SHOWN}.")
@json_option
@click.pass_context
def offers_command(ctx: click.Context, /, all_: bool, json_: bool, **overrides: str) -> None:
    """What the provider would give for this need, the best first, with its price.

    \b
    labctl offers --gpu any --min-gpu-memory 16GB --max-price 1.50
    """
    from labctl.cli.screen import as_json
    from labctl.errors import NoOfferError

    lab = open_lab(ctx, quiet=json_, overrides=overrides, needs_file=False)
    found = lab.ground.provider.offers(lab.config.server.need)
    if json_:
        as_json({"offers": found})
    elif found:
        _draw_offers(found if all_ else found[:MOST_SHOWN], len(found))
    if not found:
        raise NoOfferError(
            f"{lab.ground.provider.name} has nothing that fits", hint="labctl config"
        )


def _draw_offers(offers: Sequence[Offer], total: int) -> None:
    import time

    from labctl.cli.screen import span, table

    rows = [
        (
            one.type,
            _gpus(one),
            one.zone or "-",
            f"{one.price_usd_per_hour:.4f}",
            _week(one),
            f"{one.on_demand_usd_per_hour:.4f}" if one.on_demand_usd_per_hour else "-",
            _market(one),
        )
        for one in offers
    ]
    table(rows, ("TYPE", "GPU", "ZONE", "USD/H", "7 DAYS", "LIST", "MARKET"))
    oldest = min((one.priced_at for one in offers if one.priced_at), default=0.0)
    said = [f"prices {span(time.time() - oldest)} old"] if oldest else []
    said += [f"and {total - len(offers)} more: --all"] if total > len(offers) else []
    if said:
        click.echo("; ".join(said), err=True)


def _gpus(offer: Offer) -> str:
    if not offer.gpu_count:
        return "-"
    many = f"{offer.gpu_count}x " if offer.gpu_count > 1 else ""
    return f"{many}{offer.gpu_name} {offer.gpu_memory_bytes / 1024**3:.0f}GiB"


def _week(offer: Offer) -> str:
    low, high = offer.week_low_usd_per_hour, offer.week_high_usd_per_hour
    return f"{low:.3f}-{high:.3f}" if low is not None and high is not None else "-"


def _market(offer: Offer) -> str:
    """Spot, and what it saves against the list price."""
    if not offer.spot:
        return "on demand" if offer.price_usd_per_hour else "-"
    full = offer.on_demand_usd_per_hour
    return f"spot -{1 - offer.price_usd_per_hour / full:.0%}" if full else "spot"


@click.command("extend")
@click.argument("span")
@json_option
@click.pass_context
def extend_command(ctx: click.Context, span: str, json_: bool) -> None:
    """Let the server live SPAN longer, within max_ttl and the budget.

    \b
    labctl extend 30m
    """
    from labctl.cli.screen import as_json
    from labctl.cli.screen import span as spoken
    from labctl.config import parse_duration
    from labctl.errors import UsageError
    from labctl.lifecycle.extend import extend

    try:
        span_s = parse_duration(span)
    except ValueError as error:
        raise UsageError(str(error), hint="labctl extend 30m") from None
    watch = extend(open_lab(ctx, quiet=json_).ground, span_s)
    if json_:
        as_json({"watch": watch})
    elif watch.get("ttl_left_s") is not None:
        click.echo(f"it ends in {spoken(watch['ttl_left_s'])} now{_sooner(watch)}")
    else:
        click.echo("no ttl is set: only idle time, the budget or `labctl down` end it")


def _sooner(watch: dict[str, Any]) -> str:
    """What may end a server before its time is up; "" where nothing can."""
    from labctl.cli.screen import span as spoken

    budget_s, idle_s = watch.get("budget_left_s"), watch.get("idle_left_s")
    said = []
    if budget_s is not None and budget_s < watch["ttl_left_s"]:
        said.append(f"its budget is spent in {spoken(budget_s)}")
    if idle_s is not None and idle_s < watch["ttl_left_s"]:
        said.append(f"without work it ends in {spoken(idle_s)}")
    return "; " + ", ".join(said) if said else ""


@click.command("cost")
@click.option("--all", "all_", is_flag=True, help="Of every lab that this machine has a record of.")
@json_option
@click.pass_context
def cost_command(ctx: click.Context, all_: bool, json_: bool) -> None:
    """Hours and dollars of each server and run, from the ledger.

    Disk and traffic are not in it. What is not known says so.

    \b
    labctl cost
    labctl cost --all --json
    """
    from labctl.cli.screen import as_json
    from labctl.servers.cost import costs

    lab = open_lab(ctx, quiet=json_, record_only=True, needs_file=not all_)
    if lab.keeper:
        from labctl.lifecycle.reconcile import hear

        hear(lab.ground)
    found = costs(lab.ground, every_lab=all_)
    if json_:
        as_json({"costs": found})
    else:
        _draw_costs(found, all_)


def _draw_costs(costs: Costs, every_lab: bool) -> None:
    from labctl.cli.screen import table

    if not costs.servers:
        click.echo("no server is on record")
        _draw_kept(costs.kept)
        return
    rows = [
        (
            _short(one.server_id),
            f"{one.lab or '?'}: {one.type}" if every_lab else one.type,
            f"{one.hours:.2f}{' up' if one.running else ''}",
            _dollars(one.price_usd_per_hour, 4),
            _dollars(one.cost_usd),
            (_dollars(one.spot_saved_usd) if one.spot else "-"),
            "?" if one.idle_share is None else f"{one.idle_share:.0%}",
        )
        for one in costs.servers
    ]
    table(rows, ("SERVER", "TYPE", "HOURS", "USD/H", "USD", "SAVED", "IDLE"))
    for one in costs.servers:
        if one.note:
            click.echo(f"{_short(one.server_id)}: {one.note}")
    if costs.runs:
        click.echo()
        runs = [
            (one.run_id, _short(one.server_id), f"{one.hours:.2f}", _dollars(one.cost_usd))
            for one in costs.runs
        ]
        table(runs, ("RUN", "SERVER", "HOURS", "USD"))
    known = "" if costs.complete else " of what is known (?: not known)"
    saved = f"; spot saved {costs.spot_saved_usd:.2f}" if costs.spot_saved_usd else ""
    click.echo(f"\ntotal{known}: {costs.total_usd:.2f} dollars{saved}")
    _draw_kept(costs.kept)


def _draw_kept(found: Sequence[KeptDisk]) -> None:
    """Disks that outlived their server: what each costs per month, and what there is to do."""
    from labctl.cli.exit_codes import clean
    from labctl.servers.disks import told

    for one in found:
        click.echo(clean(told(one)))
    if found:
        _say_ways()


def _say_ways() -> None:
    click.echo("  labctl up && labctl pull                brings home what is on it")
    click.echo("  labctl orphans --terminate --kept-too   removes it, and what is on it")


def _short(server_id: str) -> str:
    """The id without its region: narrower, and as unique."""
    return server_id.partition(".")[0]


def _dollars(amount: float | None, digits: int = 2) -> str:
    return "?" if amount is None else f"{amount:.{digits}f}"


@click.command("down")
@click.option("--discard", is_flag=True, help="Do not save results that are only there.")
@click.option(
    "--forget",
    is_flag=True,
    help="End nothing; drop the records of what these credentials do not show.",
)
@yes_option
@json_option
@click.pass_context
def down_command(ctx: click.Context, discard: bool, forget: bool, yes: bool, json_: bool) -> None:
    """Bring home what is not here yet, remove the server, and say what is left.

    Exit 1 if anything still bills.

    \b
    labctl down
    labctl down --yes
    """
    from labctl.cli.screen import as_json

    lab = open_lab(ctx, yes=yes, quiet=json_)
    if forget:
        _forget(lab, json_)
        return
    ending = lab.down(discard=discard)
    billing = [r for r in ending.leftovers if r.price_usd_per_month > 0]
    if json_:
        as_json(
            {
                "removed": ending.removed,
                "pulled_files": ending.pulled_files,
                "saved_edits": ending.saved_edits,
                "servers_left": ending.servers_left,
                "leftovers": ending.leftovers,
            }
        )
    else:
        if ending.pulled_files or ending.saved_edits:
            edits = f", {ending.saved_edits} edited files in server-edits/"
            click.echo(
                f"brought home: {ending.pulled_files} files in runs/"
                + (edits if ending.saved_edits else "")
            )
        click.echo(
            f"removed {ending.removed}" if ending.removed else f"{lab.config.name} had no server"
        )
        caches = [r for r in ending.leftovers if r.kind == "cache"]
        kept = any(r.expires_at for r in ending.leftovers)
        for left in ending.servers_left:
            click.echo(f"STILL THERE: {left.id} ({left.state})", err=True)
        for one in [r for r in ending.leftovers if r.kind != "cache"]:
            click.echo(_left(one))
        if kept:
            _say_ways()
        if not ending.servers_left and not billing:
            stays = f" ({len(caches)} image caches stay for the next up)" if caches else ""
            click.echo(f"nothing of it is left that runs or costs anything{stays}")
    ctx.exit(1 if ending.servers_left or billing else 0)


def _forget(lab: Lab, json_: bool) -> None:
    from labctl.cli.screen import as_json

    names = lab.forget().names
    if json_:
        as_json({"forgotten": names})
        return
    for name in names:
        click.echo(f"forgotten: {name}")
    click.echo("Whatever still exists of it keeps billing.")


def _left(one: Resource) -> str:
    from labctl.servers.disks import costs, short

    note = f" ({one.note})" if one.note and not one.expires_at else ""
    return f"left: {one.kind} {short(one) if one.expires_at else one.id}: {costs(one)}{note}"


@click.command("orphans")
@click.option("--provider", help="Over lab.yaml's server.provider.")
@click.option("--all-regions", is_flag=True, help="In every region of the account.")
@click.option("--terminate", is_flag=True, help="End all of it; results there are lost.")
@click.option(
    "--kept-too", is_flag=True, help="Also disks kept for their data, before their time is over."
)
@yes_option
@json_option
@click.pass_context
def orphans_command(
    ctx: click.Context,
    provider: str | None,
    all_regions: bool,
    terminate: bool,
    kept_too: bool,
    yes: bool,
    json_: bool,
) -> None:
    """Everything at the provider that labctl made, also what this machine knows nothing of.

    Exit 1 if anything bills.

    \b
    labctl orphans --provider aws --all-regions
    labctl orphans --terminate
    """
    from labctl.cli.screen import as_json
    from labctl.servers.leftovers import end_them, orphans

    overrides = {"provider": provider} if provider else {}
    lab = open_lab(
        ctx, yes=yes, quiet=json_, overrides=overrides, needs_file=False, everywhere=all_regions
    )
    found = orphans(lab.ground)
    if terminate:
        found = end_them(lab.ground, found, kept_too=kept_too)
    if json_:
        as_json({"orphans": found, "billing": found.billing})
    else:
        _draw_orphans(found)
    ctx.exit(1 if found.billing else 0)


def _draw_orphans(found: Orphans) -> None:
    import time

    from labctl.cli.screen import ago, table
    from labctl.servers.disks import costs, short

    if not found.servers and not found.resources:
        where = "shown to these credentials" if found.elsewhere else "there"
        click.echo(f"nothing that labctl made is {where}")
        return
    now = time.time()
    rows = [
        (
            "server",
            one.id,
            one.lab,
            f"{one.offer.price_usd_per_hour:.4f} an hour",
            ago(one.created_at, now),
            f"{one.state}{', known here' if one.id in found.here else ''}",
        )
        for one in found.servers
    ]
    rows += [
        (
            one.kind,
            one.id,
            one.lab,
            f"{one.price_usd_per_month:.2f} a month",
            ago(one.created_at, now),
            "kept" if one.expires_at else one.note,
        )
        for one in found.resources
    ]
    table(rows, ("WHAT", "ID", "LAB", "USD", "AGE", ""))
    for one in found.resources:
        if one.expires_at:
            click.echo(f"kept disk {short(one)}: {costs(one)}")

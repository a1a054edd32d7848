"""course plan: what will be made, what it costs at most, quota against need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import staff_of
from labctl.cli.options import json_option

if TYPE_CHECKING:
    from labctl.courses.plan import Plan, QuotaNeed

MOST_NAMED = 12


@click.command("plan", short_help="What will be made, what it costs at most, quota and need.")
@click.option("--offline", is_flag=True, help="Ask no provider: no prices, no quotas.")
@json_option
@click.pass_context
def plan_command(ctx: click.Context, offline: bool, json_: bool) -> None:
    """What changed since the last plan, what there is to make, what it costs and whether it fits.

    Nothing is made. Exit 1 where the provider does not answer, has nothing that fits, or the quota
    is too small for the class.

    \b
    labctl course plan
    """
    from labctl.cli.screen import as_json
    from labctl.courses.plan import plan, remember

    staff = staff_of(open_course(ctx, quiet=json_))
    found = plan(staff, offline=offline)
    if json_:
        as_json({"plan": found})
    else:
        _draw(found)
    remember(staff)
    short = found.quotas and not any(one.enough for one in found.quotas)
    ctx.exit(1 if found.problem or short else 0)


def _line(sign: str, text: str) -> None:
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import folded

    colours = {"+": "green", "-": "red", "~": "yellow", "!": "yellow"}
    first, *rest = folded(clean(text), 2) or [""]
    click.echo(click.style(f"{sign} ", fg=colours.get(sign)) + first)
    for line in rest:
        click.echo(f"  {line}")


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _draw(found: Plan) -> None:
    from labctl.cli.screen import folded

    click.echo(f"{found.course}: {found.students} students, {found.seats} seats")
    _draw_changes(found)
    what = f"{found.servers} servers in all" if found.servers != 1 else "one server in all"
    if found.accounts_per_server:
        what = f"{what}, shared: {found.accounts_per_server} accounts each"
    if found.to_make:
        _line("+", f"to make: {len(found.to_make)} seats: {_names(found.to_make)}")
    if found.running:
        _line("=", f"there already: {len(found.running)} seats")
    if found.to_end:
        _line("-", f"to end, their students left or changed teams: {_names(found.to_end)}")
    click.echo()
    for line in folded(f"{what}; each ends {found.limits}"):
        click.echo(line)
    _draw_money(found)
    if found.quotas:
        click.echo()
    for quota in found.quotas:
        _draw_quota(quota, alone=not any(one.enough for one in found.quotas))
    if found.cautions:
        click.echo()
    for text in found.cautions:
        _line("!", text)
    _draw_next(found)


def _draw_changes(found: Plan) -> None:
    if found.first:
        click.echo("the first plan of this course")
    for one in found.changes if not found.first else ():
        if not one.before:
            _line("+", f"{one.key}: {one.after}")
        elif not one.after:
            _line("-", f"{one.key}: {one.before}")
        else:
            _line("~", f"{one.key}: {one.before} -> {one.after}")
    if found.new_seats:
        _line("+", f"new seats: {_names(found.new_seats)}")
    if found.gone_seats:
        _line("-", f"seats whose students have left: {_names(found.gone_seats)}")


def _draw_money(found: Plan) -> None:
    from labctl.cli.course_costs import forecast_lines
    from labctl.cli.screen import folded

    offer = found.offer
    if offer is not None:
        market = "spot" if offer.spot else "on demand"
        where = f" in {offer.zone or offer.region}" if offer.zone or offer.region else ""
        gpu = f", {offer.gpu_count} x {offer.gpu_name}" if offer.gpu_count else ""
        price = offer.price_usd_per_hour
        click.echo(f"{offer.provider} {offer.type}{where} ({market}{gpu}): {price:.4f} USD an hour")
        rows = [
            ("all of them, an hour", found.usd_per_hour),
            ("all of them once, at most", found.once_at_most_usd),
            (f"class hours, a week ({found.class_hours_per_week:.1f} h)", found.usd_per_week),
            ("class hours to the end of term", found.term_class_usd),
        ]
        for label, usd in rows:
            if usd is not None:
                click.echo(f"  {label:<36} {usd:>12,.2f} USD")
    if found.costs.usd:
        click.echo(f"  {'spent so far':<36} {found.costs.usd:>12,.2f} USD")
    lines = forecast_lines(found.costs.forecast)
    foretold = found.costs.forecast.expected_usd is not None or found.term_class_usd is None
    for line in lines if foretold else lines[-1:]:
        for part in folded(line, 2):
            click.echo(f"  {part}")


def _draw_quota(quota: QuotaNeed, *, alone: bool) -> None:
    from labctl.cli.screen import folded

    room = quota.room
    needs = f"{quota.servers * room.each:g} {room.units} needed"
    allowed = "nobody tells what is allowed" if room.limit is None else f"{room.limit:g} allowed"
    mark = "=" if quota.enough else ("-" if alone else "!")
    _line(mark, f"quota, {quota.market}: {needs}, {allowed} ({room.quota})")
    if not quota.enough and alone:
        click.echo("  send this, weeks ahead:")
        for line in folded(quota.request, 4):
            click.echo(f"    {line}")
        if room.next:
            click.echo(f"  {room.next}")


def _draw_next(found: Plan) -> None:
    if found.problem:
        click.echo()
        _line("-", found.problem)
        if found.problem_next:
            click.echo(f"  next: {found.problem_next}")
    elif found.to_make:
        click.echo("\nnext: labctl course up", err=True)

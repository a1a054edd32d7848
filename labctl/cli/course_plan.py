"""The command course plan: planned servers, their highest cost, and quotas."""

from __future__ import annotations

import click

from labctl.cli.course import open_course
from labctl.cli.course_costs import forecast_lines
from labctl.cli.course_options import make_staff
from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option
from labctl.cli.starter_output import count_files
from labctl.cli.tables import print_json, wrap_text
from labctl.cli.wrapping import print_message
from labctl.courses.plan import CoursePlan, QuotaNeed, compute_plan, store_plan_snapshot
from labctl.text import count_text, dollars_text, names_text, next_lines, price_text

MAX_NAMES = 12


@click.command("plan", short_help="Show planned servers, their highest cost, and quotas.")
@click.option("--offline", is_flag=True, help="Contact no provider: no prices, no quotas.")
@json_option
@click.pass_context
def plan_command(ctx: click.Context, offline: bool, json_: bool) -> None:
    """Show changes since the last plan, the servers to create, their cost, and the quota.

    labctl creates nothing. Exits with 1 if the provider does not answer, no server fits, or no
    quota is large enough for the class.

    \b
    labctl course plan
    """
    staff = make_staff(open_course(ctx, quiet=json_))
    course_plan = compute_plan(staff, offline=offline)
    if json_:
        print_json({"plan": course_plan})
    else:
        print_plan(course_plan)
    store_plan_snapshot(staff)
    lacks_quota = course_plan.quotas and not any(quota.enough for quota in course_plan.quotas)
    ctx.exit(1 if course_plan.problem or lacks_quota else 0)


def _print_item(sign: str, text: str) -> None:
    colors = {"+": "green", "-": "red", "~": "yellow", "!": "yellow"}
    first, *more = wrap_text(clean(text), 2) or [""]
    click.echo(click.style(f"{sign} ", fg=colors.get(sign)) + first)
    for line in more:
        click.echo(f"  {line}")


def print_plan(plan: CoursePlan) -> None:
    click.echo(
        f"{plan.course}: {count_text(plan.students, 'student')}, {count_text(plan.seats, 'seat')}"
    )
    _print_changes(plan)
    servers = f"{plan.servers} servers in all" if plan.servers != 1 else "one server in all"
    if plan.machines:
        nodes = names_text(plan.machines[1:], MAX_NAMES) or "no other machine"
        servers = f"one cluster: controller {plan.machines[0]}, and {nodes}"
        servers = f"{servers}; {count_text(plan.accounts_per_server, 'account')}"
    elif plan.accounts_per_server:
        servers = f"{servers}, shared: {plan.accounts_per_server} accounts each"
    if plan.to_make:
        _print_item(
            "+",
            f"to create: {count_text(len(plan.to_make), 'seat')}: "
            f"{names_text(plan.to_make, MAX_NAMES)}",
        )
    if plan.running:
        _print_item("=", f"already running: {count_text(len(plan.running), 'seat')}")
    if plan.to_end:
        names = names_text(plan.to_end, MAX_NAMES)
        _print_item("-", f"to remove, because their students left or changed teams: {names}")
    click.echo()
    for line in wrap_text(f"{servers}; each ends {plan.limits}"):
        click.echo(line)
    if plan.queue:
        click.echo("\n".join(wrap_text(plan.queue)))
    _print_money(plan)
    if plan.assignments or plan.grading:
        click.echo()
    for text in (*plan.assignments, *plan.grading):
        click.echo("\n".join(wrap_text(clean(text))))
    _print_starters(plan)
    if plan.quotas:
        click.echo()
    for quota in plan.quotas:
        _print_quota(quota, alone=not any(other.enough for other in plan.quotas))
    if plan.cautions:
        click.echo()
    for text in plan.cautions:
        _print_item("!", text)
    _print_next(plan)


def _print_changes(plan: CoursePlan) -> None:
    if plan.first:
        click.echo("the first plan of this course")
    for change in plan.changes if not plan.first else ():
        if not change.before:
            _print_item("+", f"{change.key}: {change.after}")
        elif not change.after:
            _print_item("-", f"{change.key}: {change.before}")
        else:
            _print_item("~", f"{change.key}: {change.before} -> {change.after}")
    if plan.new_seats:
        _print_item("+", f"new seats: {names_text(plan.new_seats, MAX_NAMES)}")
    if plan.gone_seats:
        _print_item("-", f"seats without students: {names_text(plan.gone_seats, MAX_NAMES)}")


def _print_starters(plan: CoursePlan) -> None:
    if plan.starters:
        click.echo()
    for starter in plan.starters:
        # `files` includes the tests: `labctl course push` counts them too.
        tests = f" ({count_files(starter.tests, 'test ')} among them)" if starter.tests else ""
        text = f"{starter.assignment}: {count_files(starter.files)}{tests} from {starter.source}"
        if starter.published == "current":
            _print_item("=", f"{text}; published")
        elif starter.published:
            _print_item("~", f"{text}; an older version is published (labctl course push)")
        else:
            _print_item("+", f"{text}; not published yet (labctl course push)")


def _print_money(plan: CoursePlan) -> None:
    offer = plan.offer
    if offer is not None:
        market = "spot" if offer.spot else "on demand"
        zone = f" in {offer.zone or offer.region}" if offer.zone or offer.region else ""
        gpu = f", {offer.gpu_count} x {offer.gpu_name}" if offer.gpu_count else ""
        price = offer.price_usd_per_hour
        if not price and not plan.costs.usd:
            click.echo(f"{offer.provider} {offer.type}{zone}: free")
            return
        click.echo(f"{offer.provider} {offer.type}{zone} ({market}{gpu}): {price_text(price)}")
        rows = [
            ("all servers, per hour", plan.usd_per_hour),
            ("all servers once, at most", plan.once_at_most_usd),
            (f"class hours per week ({plan.class_hours_per_week:.1f} h)", plan.usd_per_week),
            ("class hours to the end of term", plan.term_class_usd),
            ("if baked, machine image per month", plan.image_at_most_usd),
        ]
        for label, usd in rows:
            if usd is not None:
                click.echo(f"  {label:<36} {dollars_text(usd):>12}")
    if plan.image is not None and plan.image.usd_per_month:
        usd_text = dollars_text(plan.image.usd_per_month)
        click.echo(f"  {'baked machine image, per month':<36} {usd_text:>12}")
    if plan.costs.usd:
        click.echo(f"  {'spent so far':<36} {dollars_text(plan.costs.usd):>12}")
    lines = forecast_lines(plan.costs.forecast)
    show_all = plan.costs.forecast.expected_usd is not None or plan.term_class_usd is None
    for line in lines if show_all else lines[-1:]:
        for part in wrap_text(line, 2):
            click.echo(f"  {part}")


def _print_quota(quota: QuotaNeed, *, alone: bool) -> None:
    room = quota.room
    needs = f"{quota.servers * room.each:g} {room.units} needed"
    allowed = "the limit is unknown" if room.limit is None else f"{room.limit:g} allowed"
    mark = "=" if quota.enough else ("-" if alone else "!")
    _print_item(mark, f"quota, {quota.market}: {needs}, {allowed} ({room.quota})")
    if not quota.enough and alone:
        click.echo("  send this request weeks ahead:")
        for line in wrap_text(quota.request, 4):
            click.echo(f"    {line}")
        if room.next:
            click.echo(f"  {room.next}")


def _print_next(plan: CoursePlan) -> None:
    if plan.problem:
        click.echo()
        _print_item("-", plan.problem)
        if plan.problem_next:
            click.echo("\n".join(next_lines(clean(plan.problem_next))))
    elif plan.to_make:
        print_message("\nnext: labctl course up")

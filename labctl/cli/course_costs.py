"""course cost, budget: what was spent, by whom, what is left and what is still to come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import staff_of
from labctl.cli.options import json_option

if TYPE_CHECKING:
    from labctl.courses.records.cost_report import CourseCosts, Forecast, SeatCost
    from labctl.courses.records.folder import CourseFolder

MOST_IDLE = 5


@click.command("cost", short_help="Dollars per student, team and assignment; the forecast.")
@click.option("--refresh", is_flag=True, help="Ask the provider first what is up.")
@click.option("--csv", "csv_", is_flag=True, help="One line for each student, without names.")
@json_option
@click.pass_context
def cost_command(ctx: click.Context, refresh: bool, csv_: bool, json_: bool) -> None:
    """What the course has cost: per student, team and assignment, what was idle, the forecast.

    A team's dollars are parted equally; an assignment's are those until its due time.

    \b
    labctl course cost
    labctl course cost --csv > costs.csv
    """
    from labctl.cli.screen import as_json
    from labctl.courses.costs import as_csv, costs

    course = open_course(ctx, quiet=json_ or csv_)
    found = costs(staff_of(course), refresh=refresh)
    if json_:
        as_json({"costs": found})
    elif csv_:
        click.echo(as_csv(found), nl=False)
    else:
        _draw_costs(found)


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _seat(name: str) -> str:
    """A dot begins what the course itself has a server for."""
    return f"({name[1:]})" if name.startswith(".") else name


def _bar(share: float | None) -> str:
    """A budget of which so much is spent, in ten places."""
    if share is None:
        return "-"
    filled = min(10, int(share * 10 + 0.5))
    return f"{'#' * filled}{'.' * (10 - filled)} {share:4.0%}"


def _draw_costs(found: CourseCosts) -> None:
    from labctl.cli.screen import folded, table

    rows = [
        (
            _seat(one.seat),
            _usd(one.usd),
            f"{one.hours:.1f}",
            f"{one.idle_hours:.1f}",
            _usd(one.budget_usd),
            _usd(one.left_usd),
            _bar(one.share),
            ", ".join(one.students) if one.students != (one.seat,) else "",
        )
        for one in sorted(found.seats, key=lambda one: -one.usd)
        if one.usd or one.hours
    ]
    if rows:
        heads = ("SEAT", "USD", "HOURS", "IDLE H", "BUDGET", "LEFT", "USED", "TEAM")
        teams = any(row[-1] for row in rows)
        table(rows if teams else [row[:-1] for row in rows], heads if teams else heads[:-1])
    quiet = len(found.seats) - len(rows)
    if quiet:
        click.echo(f"{'and ' if rows else ''}{quiet} seats that cost nothing")
    if found.assignments:
        click.echo()
        named = [
            (
                one.assignment or "(after the last due time)",
                _usd(one.usd),
                f"{one.hours:.1f}",
                str(one.seats),
            )
            for one in found.assignments
        ]
        table(named, ("ASSIGNMENT", "USD", "HOURS", "SEATS"))
    _draw_idle(found)
    click.echo(f"\ntotal {_usd(found.usd)} USD, of which {_usd(found.idle_usd)} idle")
    for line in forecast_lines(found.forecast):
        click.echo("\n".join(folded(line)))
    if not found.complete:
        click.echo("from the ledger; --refresh asks the provider", err=True)


def _draw_idle(found: CourseCosts) -> None:
    from labctl.cli.screen import table

    rows = [
        (
            one.seat,
            _usd(one.usd),
            f"{one.idle_hours:.1f}",
            time.strftime("%a %d %b %H:%M", time.localtime(one.since)),
            time.strftime("%a %d %b %H:%M", time.localtime(one.until)),
            one.server_id,
        )
        for one in found.idle[:MOST_IDLE]
        if one.usd
    ]
    if rows:
        click.echo("\nthe most expensive idle hours")
        table(rows, ("SEAT", "USD", "IDLE H", "FROM", "TO", "SERVER"))


def forecast_lines(found: Forecast) -> list[str]:
    """The forecast in words."""
    lines = []
    pace = f"at {_usd(found.usd_per_day)} a day as in the last two weeks"
    hours = f"{found.class_hours_left:.0f} class hours left, at the present price"
    if found.until is not None:
        by = f"by the end of term, {time.strftime('%d %b %Y', time.localtime(found.until - 1))}"
        if found.expected_usd is None:
            lines.append(f"{by}: too little to tell by yet")
        elif found.expected_usd == found.at_most_usd:
            lines.append(f"{by}: every budget used up ({pace if found.basis == 'pace' else hours})")
        else:
            said = pace if found.basis == "pace" else hours
            lines.append(f"{by}: {_usd(found.expected_usd)} USD ({said})")
    if found.at_most_usd is not None:
        lines.append(f"at most, all budgets spent: {_usd(found.at_most_usd)} USD")
    else:
        lines.append("at most: without end, for want of per_student.budget")
    return lines


@click.command(
    "budget",
    short_help="Give a student more, or see what is left.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("student", required=False)
@click.argument("amount", required=False, metavar="AMOUNT")
@click.option("--why", default="", help="Kept in the ledger beside it.")
@json_option
@click.pass_context
def budget_command(
    ctx: click.Context, student: str | None, amount: str | None, why: str, json_: bool
) -> None:
    """What is left of budgets; with AMOUNT, give STUDENT (or a team) more.

    +5 is five dollars on top, -5 five less, 25 makes it 25 in all. A server that is up knows at
    once.

    \b
    labctl course budget
    labctl course budget alice +5 --why "second topic"
    """
    from labctl.cli.screen import as_json
    from labctl.courses.allowances import budget
    from labctl.courses.costs import costs

    course = open_course(ctx, quiet=json_)
    staff = staff_of(course)
    seat = course.folder.seat(student) if student else None
    changed = budget(staff, seat, amount, why) if seat and amount else None
    every = [one for one in costs(staff).seats if not one.seat.startswith(".")]
    found = [one for one in every if seat is None or one.seat == seat.name]
    if json_:
        as_json({"budgets": found, "changed": changed})
        return
    if changed:
        before, after = changed.before_usd, changed.after_usd
        click.echo(
            f"{changed.seat}: {before:.2f} -> {after:.2f} USD, {_usd(found[0].left_usd)} left"
        )
        if changed.server_id and not changed.in_force:
            said = f"again later: labctl course budget {changed.seat} +0"
            click.echo(f"its server does not know yet; {said}", err=True)
        return
    _draw_budgets(found)
    if seat:
        _draw_history(course.folder, seat.name)


def _draw_budgets(found: list[SeatCost]) -> None:
    from labctl.cli.screen import table

    rows = [
        (one.seat, _usd(one.budget_usd), _usd(one.usd), _usd(one.left_usd), _bar(one.share))
        for one in found
    ]
    table(rows, ("SEAT", "BUDGET", "USD", "LEFT", "USED"))


def _draw_history(folder: CourseFolder, seat: str) -> None:
    from labctl.cli.exit_codes import clean

    for one in folder.ledger.entries(seat=seat, kind="budget"):
        at = time.strftime("%d %b %H:%M", time.localtime(one.at))
        click.echo(clean(f"{at}  {float(one.detail.get('usd', 0)):+.2f}  {one.by}  {one.why}"))

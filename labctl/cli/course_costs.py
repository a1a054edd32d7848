"""The commands course cost and course budget: money spent, money left, and the forecast."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import WHY, fit_names_by_seat, is_wide_screen, make_staff
from labctl.cli.exit_codes import clean, print_next
from labctl.cli.options import json_option
from labctl.cli.tables import print_json, print_table, wrap_text
from labctl.cli.wrapping import print_message
from labctl.courses.costs import compute_costs, format_csv
from labctl.lazy import lazy_imports
from labctl.text import count_text, dollars_text, optional_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from labctl.courses.records.cost_report import CourseCosts, Forecast, SeatCost
    from labctl.courses.records.folder import CourseFolder

with lazy_imports(__name__):
    from labctl.courses import allowances

MAX_IDLE_ROWS = 5


@click.command("cost", short_help="Show cost per student, team and assignment, and a forecast.")
@click.option("--refresh", is_flag=True, help="Query the provider first.")
@click.option("--csv", "csv_", is_flag=True, help="Print CSV: a line per student, without names.")
@json_option
@click.pass_context
def cost_command(ctx: click.Context, refresh: bool, csv_: bool, json_: bool) -> None:
    """Show the cost per student, team and assignment, idle time, and a forecast.

    The cost of a team is divided equally. The cost of an assignment is the money spent
    from the previous due time to its own.

    \b
    labctl course cost
    labctl course cost --csv > costs.csv
    """
    course = open_course(ctx, quiet=json_ or csv_)
    course_costs = compute_costs(make_staff(course), refresh=refresh)
    if json_:
        print_json({"costs": course_costs})
    elif csv_:
        click.echo(format_csv(course_costs), nl=False)
    else:
        print_course_costs(course_costs, fit_names_by_seat(course.folder))


def _seat_text(name: str) -> str:
    """Return a seat's name; names with a dot, for servers of the course itself, in brackets."""
    return f"({name[1:]})" if name.startswith(".") else name


def _bar_text(share: float | None) -> str:
    """Return the share of a budget that is spent in percent, on a wide screen with a bar."""
    if share is None:
        return "-"
    if not is_wide_screen():
        return f"{share:4.0%}"
    filled = min(10, int(share * 10 + 0.5))
    return f"{'#' * filled}{'.' * (10 - filled)} {share:4.0%}"


def print_course_costs(costs: CourseCosts, names: Mapping[str, str]) -> None:
    _print_seats(costs, names)
    if costs.assignments:
        click.echo()
        assignment_rows = [
            (
                one.assignment or "(after the last due time)",
                optional_text(one.usd, dollars_text),
                f"{one.hours:.1f}",
                str(one.seats),
            )
            for one in costs.assignments
        ]
        print_table(assignment_rows, ("ASSIGNMENT", "COST", "HOURS", "SEATS"))
    _print_idle(costs, names)
    total = optional_text(costs.usd, dollars_text)
    click.echo(f"\ntotal {total}, of which {optional_text(costs.idle_usd, dollars_text)} idle")
    if costs.image_usd_per_month:
        price = dollars_text(costs.image_usd_per_month)
        click.echo(
            f"and {price} a month for the machine image; labctl course bake --drop removes it"
        )
    for line in forecast_lines(costs.forecast):
        click.echo("\n".join(wrap_text(line)))
    if not costs.complete:
        print_message("from the ledger; to query the provider: --refresh")


def _print_seats(costs: CourseCosts, names: Mapping[str, str]) -> None:
    rows = [
        (
            _seat_text(seat.seat),
            names.get(seat.seat, "-"),
            optional_text(seat.usd, dollars_text),
            f"{seat.hours:.1f}",
            f"{seat.idle_hours:.1f}",
            optional_text(seat.budget_usd, dollars_text),
            optional_text(seat.left_usd, dollars_text),
            _bar_text(seat.share),
            ", ".join(seat.students) if seat.students != (seat.seat,) else "",
        )
        for seat in sorted(costs.seats, key=lambda seat: -seat.usd)
        if seat.usd or seat.hours
    ]
    if rows:
        headings = ("SEAT", "NAME", "COST", "HOURS", "IDLE H", "BUDGET", "LEFT", "USED", "TEAM")
        if any(row[-1] for row in rows):
            print_table(rows, headings)
        else:
            print_table([row[:-1] for row in rows], headings[:-1])
    without_cost = len(costs.seats) - len(rows)
    if without_cost:
        click.echo(f"{'and ' if rows else ''}{count_text(without_cost, 'seat')} without cost")
    used = [(seat, seat.gpu_minutes) for seat in costs.seats if seat.gpu_minutes is not None]
    if used:
        minute_rows = [
            (seat.seat, names.get(seat.seat, "-"), str(minutes))
            for seat, minutes in sorted(used, key=lambda pair: -pair[1].used)
        ]
        click.echo()
        print_table(minute_rows, ("SEAT", "NAME", "GPU MINUTES"))


def _print_idle(costs: CourseCosts, names: Mapping[str, str]) -> None:
    rows = [
        (
            idle.seat,
            names.get(idle.seat, "-"),
            optional_text(idle.usd, dollars_text),
            f"{idle.idle_hours:.1f}",
            time.strftime("%a %d %b %H:%M", time.localtime(idle.since)),
            time.strftime("%a %d %b %H:%M", time.localtime(idle.until)),
            idle.server_id,
        )
        for idle in costs.idle[:MAX_IDLE_ROWS]
        if idle.usd
    ]
    if rows:
        click.echo("\nthe most expensive idle hours")
        headings = ("SEAT", "NAME", "COST", "IDLE H", "FROM", "TO", "SERVER")
        if is_wide_screen():
            print_table(rows, headings)
        else:
            print_table([row[:-1] for row in rows], headings[:-1])


def forecast_lines(forecast: Forecast) -> list[str]:
    """Describe a forecast: the expected cost by the end of term, and the highest possible."""
    lines = []
    pace = f"at {optional_text(forecast.usd_per_day, dollars_text)} a day as in the last two weeks"
    hours = f"{forecast.class_hours_left:.0f} class hours left, at the current price"
    basis = pace if forecast.basis == "pace" else hours
    if forecast.until is not None:
        day = time.strftime("%d %b %Y", time.localtime(forecast.until - 1))
        if forecast.expected_usd is None:
            amount = "not enough data for a forecast"
        elif forecast.expected_usd == forecast.at_most_usd:
            amount = f"every budget used up ({basis})"
        else:
            amount = f"{optional_text(forecast.expected_usd, dollars_text)} ({basis})"
        lines.append(f"by the end of term, {day}: {amount}")
    if forecast.at_most_usd is not None:
        lines.append(
            "at most, if every budget is spent: "
            f"{optional_text(forecast.at_most_usd, dollars_text)}"
        )
    else:
        lines.append("at most: unlimited, because per_student.budget is not set")
    return lines


@click.command(
    "budget",
    short_help="Show or change the budgets of students.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("student", required=False)
@click.argument("amount", required=False, metavar="[AMOUNT]")
@WHY
@json_option
@click.pass_context
def budget_command(
    ctx: click.Context, student: str | None, amount: str | None, why: str, json_: bool
) -> None:
    """Show all budgets, or that of STUDENT (or a team); with AMOUNT, change it.

    +5 adds five dollars, -5 subtracts five, and 25 sets the budget to 25. A running server gets
    the new budget at once.

    \b
    labctl course budget
    labctl course budget alice +5 --why "second topic"
    """
    course = open_course(ctx, quiet=json_)
    staff = make_staff(course)
    seat = course.folder.find_seat(student) if student else None
    changed = allowances.change_budget(staff, seat, amount, why) if seat and amount else None
    all_seats = [one for one in compute_costs(staff).seats if not one.seat.startswith(".")]
    seat_costs = [one for one in all_seats if seat is None or one.seat == seat.name]
    if json_:
        print_json({"budgets": seat_costs, "changed": changed})
        return
    if changed:
        before, after = dollars_text(changed.before_usd), dollars_text(changed.after_usd)
        left = optional_text(seat_costs[0].left_usd, dollars_text)
        click.echo(f"{changed.seat}: {before} -> {after}, {left} left")
        if changed.server_id and not changed.in_force:
            command = f"labctl course budget {changed.seat} +0"
            print_message("its server could not be updated")
            print_next(f"{command}   # later")
        return
    _print_budgets(seat_costs, fit_names_by_seat(course.folder))
    if seat:
        _print_history(course.folder, seat.name)


def _print_budgets(seat_costs: list[SeatCost], names: Mapping[str, str]) -> None:
    rows = [
        (
            one.seat,
            names.get(one.seat, "-"),
            optional_text(one.budget_usd, dollars_text),
            optional_text(one.usd, dollars_text),
            optional_text(one.left_usd, dollars_text),
            _bar_text(one.share),
        )
        for one in seat_costs
    ]
    print_table(rows, ("SEAT", "NAME", "BUDGET", "SPENT", "LEFT", "USED"))


def _print_history(folder: CourseFolder, seat: str) -> None:
    for entry in folder.ledger.list_entries(seat=seat, kind="budget"):
        when = time.strftime("%d %b %H:%M", time.localtime(entry.at))
        usd = float(entry.detail.get("usd", 0))
        amount = f"{'+' if usd >= 0 else ''}{dollars_text(usd)}"
        click.echo(clean(f"{when}  {amount}  {entry.by}  {entry.why}"))

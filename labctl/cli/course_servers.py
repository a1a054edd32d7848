"""course up, down, push, message, extend; what only looks is in modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_check import bake_command, check_command
from labctl.cli.course_inspect import explain_command, logs_command, ssh_command, status_command
from labctl.cli.course_options import chosen, only_options, staff_of
from labctl.cli.options import SCREEN, json_option, yes_option

if TYPE_CHECKING:
    from labctl.courses.leftovers import Left
    from labctl.courses.servers import SeatOutcome
    from labctl.courses.teardown import Proof, SeatEnding
    from labctl.model import Server

# Stands for a seat's name in what is said of several.
SEAT = "\0"
MOST_NAMED = 8

__all__ = [
    "bake_command",
    "check_command",
    "down_command",
    "explain_command",
    "extend_command",
    "logs_command",
    "message_command",
    "push_command",
    "ssh_command",
    "status_command",
    "up_command",
]


@click.command("up")
@only_options
@click.option("--login-only", is_flag=True, help="Prepare nothing: the first login is enough.")
@click.option(
    "--at-once",
    default=32,
    show_default=True,
    type=click.IntRange(1, 256),
    help="So many servers beside each other.",
)
@yes_option
@json_option
@click.pass_context
def up_command(
    ctx: click.Context,
    only: str,
    group: str,
    login_only: bool,
    at_once: int,
    yes: bool,
    json_: bool,
) -> None:
    """A server for every seat, ready; repeated, it makes what is missing and mends what failed.

    What they cost together is asked once. Exits with 1 where a seat has no server in the end.

    \b
    labctl course up
    labctl course up --only alice,bob
    labctl course up --group lab-1
    """
    from labctl.cli.course_table import ClassScreen
    from labctl.cli.screen import as_json
    from labctl.courses.servers import up

    course = open_course(ctx, yes=yes, quiet=json_)
    seats = chosen(course, only, group)
    with ClassScreen(ctx.meta[SCREEN], [seat.name for seat in seats]) as screen:
        found = up(staff_of(course, screen), seats, login_only=login_only, at_once=at_once)
    if json_:
        as_json({"seats": found})
    else:
        _draw_up(found)
    ctx.exit(1 if any(one.error for one in found) else 0)


def _draw_up(found: list[SeatOutcome]) -> None:
    ready = [one for one in found if not one.error and one.server is not None]
    made = sum(one.made for one in ready)
    price = sum(one.server.offer.price_usd_per_hour for one in ready if one.server)
    costs = f", {price:.2f} dollars an hour together" if price else ""
    click.echo(f"{len(ready)} of {len(found)} seats are ready, {made} new{costs}.")
    _draw_unready([one.server for one in found if one.error and one.server is not None])
    _draw_failures(found)
    if len(ready) == len(found):
        click.echo("  labctl course status       who is up")
        click.echo("  labctl course ssh NAME     a shell on somebody's server")
        click.echo("  labctl course down         when the class is over")


def _draw_unready(servers: list[Server]) -> None:
    """Servers that are there, and perhaps cost, though their seats are not ready."""
    there = [one for one in servers if one.state not in ("ending", "terminated", "stopped")]
    if not there:
        return
    price = sum(one.offer.price_usd_per_hour for one in there)
    costs = f", at {price:.2f} dollars an hour" if price else ""
    what = f"{len(there)} servers are" if len(there) > 1 else "one server is"
    said = f"{what} up without being ready{costs}; labctl course down ends what is up"
    click.echo(click.style(said, fg="yellow"), err=True)


def _draw_failures(found: list[SeatOutcome] | list[SeatEnding]) -> None:
    """What failed, on standard error; seats for which it is the same share one entry."""
    from labctl.cli.exit_codes import clean

    alike: dict[tuple[str, ...], list[str]] = {}
    for one in found:
        if one.error:
            texts = (one.error, one.why, one.hint)
            alike.setdefault(tuple(t.replace(one.seat, SEAT) for t in texts), []).append(one.seat)
    for (error, why, hint), seats in alike.items():
        whose = seats[0] if len(seats) == 1 else "each"
        names = ", ".join(seats[:MOST_NAMED])
        if len(seats) > MOST_NAMED:
            names += f" and {len(seats) - MOST_NAMED} more"
        said = clean(error.replace(SEAT, whose))
        click.echo(f"{click.style(clean(names), fg='red')}: {said}", err=True)
        for line in why.replace(SEAT, whose).splitlines():
            click.echo(f"  {clean(line)}", err=True)
        following = clean(hint.replace(SEAT, ",".join(seats)))
        click.echo(f"  {click.style('next:', bold=True)} {following}", err=True)


@click.command("down")
@only_options
@click.option("--discard", is_flag=True, help="Do not bring results home: what is there is lost.")
@click.option("--end-of-term", is_flag=True, help="Collect, end, take keys back, prove it.")
@click.option(
    "--forget",
    is_flag=True,
    help="End nothing; drop the records of what these credentials do not show.",
)
@yes_option
@json_option
@click.pass_context
def down_command(
    ctx: click.Context,
    only: str,
    group: str,
    discard: bool,
    end_of_term: bool,
    forget: bool,
    yes: bool,
    json_: bool,
) -> None:
    """Bring every result home, then end the servers. What cannot be saved is not ended.

    With --end-of-term everything of the course ends: hand-ins are collected, servers of those who
    left end too, students' keys are taken back, and the provider is asked in every region. Exits
    with 1 if anything still bills.

    \b
    labctl course down
    labctl course down --only alice
    labctl course down --end-of-term
    """
    from labctl.errors import UsageError

    if (end_of_term or forget) and (only or group):
        name = "--end-of-term" if end_of_term else "--forget"
        raise UsageError(f"{name} is for the whole course", hint="without --only")
    if forget:
        _forget(ctx, yes, json_)
        return
    if end_of_term:
        _end_of_term(ctx, discard, yes, json_)
        return
    from labctl.cli.course_table import ClassScreen
    from labctl.cli.screen import as_json
    from labctl.courses.teardown import down

    course = open_course(ctx, yes=yes, quiet=json_)
    # Without a choice, of those too who have left or went into a team.
    every = list(course.folder.seats(active_only=False, former=True))
    seats = chosen(course, only, group) if only or group else every
    with ClassScreen(ctx.meta[SCREEN], [], done="saved") as screen:
        found = down(staff_of(course, screen), seats, discard=discard)
    if json_:
        as_json({"seats": found})
    else:
        _draw_down(found)
    ctx.exit(1 if any(one.error for one in found) else 0)


def _draw_down(found: list[SeatEnding]) -> None:
    ended = [one for one in found if one.ended]
    files = sum(one.saved.files for one in found)
    if not found:
        click.echo("No seat had a server.")
        return
    click.echo(f"{len(ended)} of {len(found)} servers have ended; {files} files came home.")
    _draw_failures(found)


def _forget(ctx: click.Context, yes: bool, json_: bool) -> None:
    from labctl.cli.screen import as_json
    from labctl.courses.forget import forget_lost

    course = open_course(ctx, yes=yes, quiet=json_)
    names = forget_lost(course.staff())
    if json_:
        as_json({"forgotten": names})
        return
    for name in names:
        click.echo(f"forgotten: {name}")
    click.echo("Whatever still exists of it keeps billing.")


def _end_of_term(ctx: click.Context, discard: bool, yes: bool, json_: bool) -> None:
    from labctl.cli.course_table import ClassScreen
    from labctl.cli.screen import as_json
    from labctl.courses.end_of_term import collector, revoker
    from labctl.courses.teardown import end_of_term

    course = open_course(ctx, yes=yes, quiet=json_)
    with ClassScreen(ctx.meta[SCREEN], [], done="saved") as screen:
        staff = staff_of(course, screen)
        proof = end_of_term(staff, collect=collector(staff), revoke=revoker(staff), discard=discard)
    if json_:
        as_json({"clean": proof.clean, "proof": proof})
    else:
        _draw_proof(proof)
    ctx.exit(0 if proof.clean else 1)


def _draw_proof(proof: Proof) -> None:
    from labctl.cli.exit_codes import clean

    for name, said in proof.collected.items():
        click.echo(f"{clean(name)}: {clean(said)}")
    if proof.endings:
        _draw_down(list(proof.endings))
    click.echo(f"{proof.revoked_keys} keys of students were taken back")
    for left in proof.left:
        if left.error:
            click.echo(f"{left.provider} could not be asked: {clean(left.error)}", err=True)
        for server in left.servers:
            whose = _whose(left, server.lab_id)
            price = f"{server.offer.price_usd_per_hour:.2f} dollars/h"
            click.echo(f"still there{whose}: {clean(server.id)}, {price}")
        for one in left.resources:
            whose = _whose(left, one.lab_id)
            price = f"{one.price_usd_per_month:.2f} dollars a month"
            click.echo(f"still there{whose}: {clean(one.kind)} {clean(one.id)}, {price}")
        if not (left.error or left.servers or left.resources):
            click.echo(f"{left.provider} shows nothing of this course in any region")
    if proof.clean:
        click.echo(click.style("Nothing of this course bills.", fg="green"))
    else:
        click.echo(click.style("Something may still bill.", fg="red"), err=True)
        for following in _next_of(proof):
            click.echo(f"  next: {following}", err=True)


def _whose(left: Left, lab_id: str) -> str:
    name = left.seats.get(lab_id, "")
    return f", {name}'s" if name else ""


def _next_of(proof: Proof) -> list[str]:
    """What takes away what is left: the same again does not for everything."""
    from labctl.courses.teardown import GIVE_UP

    found = []
    for left in proof.left:
        if left.former and left.bills:
            said = f"`provider: {left.provider}` in course.yaml"
            found.append(f"{said}, then labctl course down --end-of-term")
        kept = [one.lab_id for one in left.resources if one.expires_at]
        seats = {left.seats.get(lab_id, "") for lab_id in kept} - {""}
        if seats and not left.former:
            up = f"labctl course up --only {','.join(sorted(seats))}"
            found.append(f"{up} brings kept disks back\n        {GIVE_UP}")
        elif kept and not left.former:
            found.append(GIVE_UP)
    return found or ["labctl course down --end-of-term   # again"]


@click.command("push")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@only_options
@yes_option
@json_option
@click.pass_context
def push_command(
    ctx: click.Context, files: tuple[Path, ...], only: str, group: str, yes: bool, json_: bool
) -> None:
    """Hand FILES out: they are kept in handouts/ and sent to every lab on every server.

    A run sees them at /lab/data/handouts. Without FILES what is in handouts/ is sent. Servers that
    are made later get the same.

    \b
    labctl course push slides.pdf starter/
    """
    from labctl.cli.course_table import ClassScreen
    from labctl.cli.screen import as_json
    from labctl.courses.broadcast import push
    from labctl.courses.material import take

    course = open_course(ctx, yes=yes, quiet=json_)
    seats = chosen(course, only, group)
    names = take(course.folder, files)
    with ClassScreen(ctx.meta[SCREEN], [], done="has them") as screen:
        found = push(staff_of(course, screen), seats)
    if json_:
        as_json({"files": names, "seats": found})
    else:
        good = sum(not one.error for one in found)
        click.echo(f"{good} of {len(found)} servers have what is in handouts/")
        _draw_failures(found)
    ctx.exit(1 if any(one.error for one in found) else 0)


@click.command("message")
@click.argument("text")
@only_options
@json_option
@click.pass_context
def message_command(ctx: click.Context, text: str, only: str, group: str, json_: bool) -> None:
    """Show TEXT in every terminal and tmux session on the servers.

    \b
    labctl course message "lab starts at 10"
    labctl course message --group lab-1 "room 204 today"
    """
    from labctl.cli.fan_out import exit_code, summary
    from labctl.cli.screen import as_json
    from labctl.courses.broadcast import message

    course = open_course(ctx, quiet=json_)
    answers = message(staff_of(course), chosen(course, only, group), text)
    if json_:
        as_json({"servers": answers})
    else:
        click.echo(summary(answers), err=True)
    ctx.exit(1 if exit_code(answers) else 0)


@click.command("extend")
@click.argument("name")
@click.argument("span")
@click.option("--why", default="", help="Stands in the ledger beside who did it.")
@json_option
@click.pass_context
def extend_command(ctx: click.Context, name: str, span: str, why: str, json_: bool) -> None:
    """Let NAME's server live SPAN longer, beyond max_ttl too; the budget holds.

    \b
    labctl course extend alice 2h --why "long training"
    """
    from labctl.cli.screen import as_json
    from labctl.cli.screen import span as in_words
    from labctl.config import parse_duration
    from labctl.courses.broadcast import extend
    from labctl.errors import UsageError

    course = open_course(ctx, quiet=json_)
    try:
        span_s = parse_duration(span)
    except ValueError as error:
        raise UsageError(str(error), hint=f"labctl course extend {name} 2h") from None
    seat = course.folder.seat(name)
    watch = extend(staff_of(course), seat, span_s, why)
    left_s = watch.get("ttl_left_s")
    if json_:
        as_json({"seat": seat.name, "watch": watch})
    elif left_s is None:
        click.echo(f"{seat.name}: nothing ends it by time")
    else:
        click.echo(f"{seat.name}: {in_words(left_s)} left")

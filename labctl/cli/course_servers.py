"""The commands course up, down, message and extend: all that change servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import WHY, make_staff, only_options, select_seats
from labctl.cli.course_table import ClassScreen
from labctl.cli.exit_codes import clean, print_next
from labctl.cli.fan_out import exit_code, summary_text
from labctl.cli.options import DISCARD, FORGET, SCREEN, json_option, yes_option
from labctl.cli.screen import print_json
from labctl.config import parse_duration
from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.text import dollars_text, duration_text, names_text, price_text
from labctl.wire.codec import to_json

if TYPE_CHECKING:
    from labctl.courses.leftovers import ProviderLeftovers
    from labctl.courses.servers import SeatOutcome
    from labctl.courses.teardown import EndProof, SeatEnding
    from labctl.model import Server

with lazy_imports(__name__):
    from labctl.courses import broadcast, end_of_term, forget, servers, teardown

# placeholder for a seat's name, so that equal messages of several seats compare equal
SEAT = "\0"
MAX_NAMES = 8


@click.command("up")
@only_options
@click.option(
    "--login-only", is_flag=True, help="Stop after the first login, without preparing the servers."
)
@click.option(
    "--at-once",
    default=32,
    show_default=True,
    type=click.IntRange(1, 256),
    help="Work on this many servers at a time.",
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
    """Start a server for every seat. Run it again to create servers that are missing or failed.

    labctl shows the total price and asks once. Exits with 1 if a seat is not ready.

    \b
    labctl course up
    labctl course up --only alice,bob
    labctl course up --group lab-1
    """
    course = open_course(ctx, yes=yes, quiet=json_)
    seats = select_seats(course, only, group)
    with ClassScreen(ctx.meta[SCREEN], [seat.name for seat in seats]) as screen:
        outcomes = servers.bring_up_servers(
            make_staff(course, screen), seats, login_only=login_only, at_once=at_once
        )
    if json_:
        print_json({"seats": outcomes})
    else:
        _print_up(outcomes)
    ctx.exit(1 if any(outcome.error for outcome in outcomes) else 0)


def _print_up(outcomes: list[SeatOutcome]) -> None:
    ready = [outcome for outcome in outcomes if not outcome.error and outcome.server is not None]
    created = sum(outcome.made for outcome in ready)
    price = sum(outcome.server.offer.price_usd_per_hour for outcome in ready if outcome.server)
    cost = f", {price_text(price)} together" if price else ""
    click.echo(f"{len(ready)} of {len(outcomes)} seats are ready, {created} new{cost}.")
    _print_unready([one.server for one in outcomes if one.error and one.server is not None])
    print_failures(outcomes)
    if len(ready) == len(outcomes):
        click.echo("  labctl course status       show the state of every seat")
        click.echo("  labctl course ssh NAME     open a shell on a student's server")
        click.echo("  labctl course down         remove the servers after class")


def _print_unready(servers: list[Server]) -> None:
    """Warn of servers that exist, and may cost money, though their seats are not ready."""
    live = [server for server in servers if server.state not in ("ending", "terminated", "stopped")]
    if not live:
        return
    price = sum(server.offer.price_usd_per_hour for server in live)
    cost = f", at {price_text(price)}" if price else ""
    count = f"{len(live)} servers are" if len(live) > 1 else "one server is"
    text = f"{count} up without being ready{cost}; to remove servers: labctl course down"
    click.echo(click.style(text, fg="yellow"), err=True)


def print_failures(outcomes: list[SeatOutcome] | list[SeatEnding]) -> None:
    """Print failures on standard error; seats with the same failure share one entry.

    Texts that differ only in the seat's name are the same failure. This only shortens the output.
    """
    seats_by_failure: dict[tuple[str, ...], list[str]] = {}
    for outcome in outcomes:
        if outcome.error:
            texts = (outcome.error, outcome.why, outcome.hint)
            failure = tuple(text.replace(outcome.seat, SEAT) for text in texts)
            seats_by_failure.setdefault(failure, []).append(outcome.seat)
    for (error, why, hint), seats in seats_by_failure.items():
        subject = seats[0] if len(seats) == 1 else "each"
        text = clean(error.replace(SEAT, subject))
        click.echo(
            f"{click.style(clean(names_text(seats, MAX_NAMES)), fg='red')}: {text}", err=True
        )
        for line in why.replace(SEAT, subject).splitlines():
            click.echo(f"  {clean(line)}", err=True)
        print_next(hint.replace(SEAT, ",".join(seats)))


@click.command("down")
@only_options
@DISCARD
@click.option(
    "--end-of-term",
    is_flag=True,
    help="Collect submissions, remove everything, revoke keys, and check that nothing costs money.",
)
@FORGET
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
    """Download all results, then remove the servers.

    If its results cannot be downloaded, a server (or at least its disk) is kept. With
    --end-of-term, labctl ends the course: it collects submissions, removes all servers, also those
    of inactive students, revokes the students' keys, and searches every region of the provider for
    leftovers. Exits with 1 if a server could not be removed or anything still costs money.

    \b
    labctl course down
    labctl course down --only alice
    labctl course down --end-of-term
    """
    if (end_of_term or forget) and (only or group):
        name = "--end-of-term" if end_of_term else "--forget"
        raise UsageError(f"{name} applies to the whole course", hint=f"labctl course down {name}")
    if forget:
        _forget(ctx, yes, json_)
        return
    if end_of_term:
        _end_term(ctx, discard, yes, json_)
        return
    course = open_course(ctx, yes=yes, quiet=json_)
    # Without a selection, include the seats of students who left or joined a team.
    all_seats = list(course.folder.list_seats(active_only=False, former=True))
    seats = select_seats(course, only, group) if only or group else all_seats
    with ClassScreen(ctx.meta[SCREEN], [], done="saved") as screen:
        endings = teardown.end_seats(make_staff(course, screen), seats, discard=discard)
    if json_:
        print_json({"seats": endings})
    else:
        _print_down(endings)
    ctx.exit(1 if any(ending.error for ending in endings) else 0)


def _print_down(endings: list[SeatEnding]) -> None:
    ended = [ending for ending in endings if ending.ended]
    files = sum(ending.saved.files for ending in endings)
    if not endings:
        click.echo("No seat had a server.")
        return
    click.echo(f"Removed {len(ended)} of {len(endings)} servers; downloaded {files} files.")
    print_failures(endings)


def _forget(ctx: click.Context, yes: bool, json_: bool) -> None:
    course = open_course(ctx, yes=yes, quiet=json_)
    names = forget.forget_lost(course.staff())
    if json_:
        print_json({"forgotten": names})
        return
    for name in names:
        click.echo(f"forgotten: {name}")
    click.echo("Anything that still exists keeps billing.")


def _end_term(ctx: click.Context, discard: bool, yes: bool, json_: bool) -> None:
    course = open_course(ctx, yes=yes, quiet=json_)
    with ClassScreen(ctx.meta[SCREEN], [], done="saved") as screen:
        staff = make_staff(course, screen)
        proof = teardown.end_of_term(
            staff,
            collect=end_of_term.make_collector(staff),
            revoke=end_of_term.make_revoker(staff),
            discard=discard,
        )
    if json_:
        print_json({"clean": proof.is_clean, "proof": proof})
    else:
        _print_proof(proof)
    ctx.exit(0 if proof.is_clean else 1)


def _print_proof(proof: EndProof) -> None:
    for name, result in proof.collected.items():
        click.echo(f"{clean(name)}: {clean(result)}")
    if proof.endings:
        _print_down(list(proof.endings))
    click.echo(f"revoked {proof.revoked_keys} keys of students")
    for left in proof.left:
        if left.error:
            click.echo(f"{left.provider} could not be checked: {clean(left.error)}", err=True)
        for server in left.servers:
            owner = _owner_text(left, server.lab_id)
            price = price_text(server.offer.price_usd_per_hour)
            click.echo(f"still there{owner}: {clean(server.id)}, {price}")
        for resource in left.resources:
            owner = _owner_text(left, resource.lab_id)
            price = f"{dollars_text(resource.price_usd_per_month)} a month"
            click.echo(f"still there{owner}: {clean(resource.kind)} {clean(resource.id)}, {price}")
        if not (left.error or left.servers or left.resources):
            click.echo(f"{left.provider} has nothing of this course in any region")
    if proof.is_clean:
        click.echo(click.style("Nothing of this course is billing.", fg="green"))
    else:
        click.echo(click.style("Something may still be billing.", fg="red"), err=True)
        for command in _next_commands(proof):
            click.echo(f"  next: {command}", err=True)


def _owner_text(left: ProviderLeftovers, lab_id: str) -> str:
    name = left.seats.get(lab_id, "")
    return f", {name}'s" if name else ""


def _next_commands(proof: EndProof) -> list[str]:
    """Return the commands that remove what is left; a repetition does not remove everything."""
    commands = []
    for left in proof.left:
        if left.former and left.has_costs:
            setting = f"`provider: {left.provider}` in course.yaml"
            commands.append(f"{setting}, then labctl course down --end-of-term")
        disk_labs = [resource.lab_id for resource in left.resources if resource.expires_at]
        seats = {left.seats.get(lab_id, "") for lab_id in disk_labs} - {""}
        if seats and not left.former:
            up = f"labctl course up --only {','.join(sorted(seats))}"
            commands.append(f"{up} attaches kept disks again\n        {teardown.GIVE_UP}")
        elif disk_labs and not left.former:
            commands.append(teardown.GIVE_UP)
    return commands or ["labctl course down --end-of-term   # again"]


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
    course = open_course(ctx, quiet=json_)
    answers = broadcast.send_message(make_staff(course), select_seats(course, only, group), text)
    if json_:
        print_json({"servers": answers})
    else:
        click.echo(summary_text(answers), err=True)
    ctx.exit(1 if exit_code(answers) else 0)


@click.command("extend")
@click.argument("name")
@click.argument("span")
@WHY
@json_option
@click.pass_context
def extend_command(ctx: click.Context, name: str, span: str, why: str, json_: bool) -> None:
    """Extend the lifetime of NAME's server by SPAN, even beyond max_ttl.

    The budget still applies.

    \b
    labctl course extend alice 2h --why "long training"
    """
    course = open_course(ctx, quiet=json_)
    try:
        span_s = parse_duration(span)
    except ValueError as error:
        raise UsageError(str(error), hint=f"labctl course extend {name} 2h") from None
    seat = course.folder.find_seat(name)
    watch = broadcast.extend_server(make_staff(course), seat, span_s, why)
    left_s = watch.ttl_left_s if watch else None
    if json_:
        print_json({"seat": seat.name, "watch": to_json(watch) if watch else {}})
    elif left_s is None:
        click.echo(f"{seat.name}: the server has no time limit")
    else:
        click.echo(f"{seat.name}: {duration_text(left_s)} left")

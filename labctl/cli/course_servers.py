"""The commands course up, down, push, message and extend: all that change servers."""

from __future__ import annotations

from pathlib import Path

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import WHY, make_staff, only_options, select_seats
from labctl.cli.course_table import ClassScreen
from labctl.cli.fan_out import exit_code, summary_text
from labctl.cli.number_range import NumberRange
from labctl.cli.options import DISCARD, FORGET, SCREEN, json_option, yes_option
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.config import parse_duration
from labctl.errors import NotFoundError, UsageError
from labctl.lazy import lazy_imports
from labctl.text import count_text, duration_text
from labctl.wire.codec import to_json

with lazy_imports(__name__):
    from labctl.cli import course_results, starter_output
    from labctl.courses import broadcast, end_of_term, forget, material, servers, starters, teardown


@click.command("up")
@only_options
@click.option(
    "--login-only", is_flag=True, help="Stop after the first login, without preparing the servers."
)
@click.option(
    "--at-once",
    default=32,
    show_default=True,
    type=NumberRange(8, 1, 256),
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
        print_json({"seats": [outcome.as_json() for outcome in outcomes]})
    else:
        course_results.print_up(outcomes)
    ctx.exit(1 if any(outcome.error for outcome in outcomes) else 0)


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
        print_json({"seats": [ending.as_json() for ending in endings]})
    else:
        course_results.print_down(endings)
    ctx.exit(1 if any(ending.error for ending in endings) else 0)


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
            access=end_of_term.count_access(staff),
            discard=discard,
        )
    if json_:
        print_json({"clean": proof.is_clean, "proof": proof.as_json()})
    else:
        course_results.print_proof(proof)
    ctx.exit(0 if proof.is_clean else 1)


@click.command("push")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@only_options
@yes_option
@json_option
@click.pass_context
def push_command(
    ctx: click.Context, files: tuple[Path, ...], only: str, group: str, yes: bool, json_: bool
) -> None:
    """Copy FILES to handouts/, and send handouts/ to every lab on every running server.

    A run finds them in /lab/data/handouts. Servers that start later get them too. The files and
    public tests of assignments are published as course.yaml names them, and written to /lab/code on
    the running servers of students. On their own machines, students get them with labctl join; on
    servers that start later, with "Get the files" on their page. Files that a student changed are
    never overwritten, and named.

    \b
    labctl course push
    labctl course push slides.pdf data/
    """
    course = open_course(ctx, yes=yes, quiet=json_)
    seats = select_seats(course, only, group)
    published = starters.publish_starters(course.folder, course.paths)
    names = material.add_handouts(course.folder, files)
    if not json_:
        course_results.print_published(published)
    with ClassScreen(ctx.meta[SCREEN], [], done="updated") as screen:
        try:
            outcomes = broadcast.push_files(make_staff(course, screen), seats)
        except NotFoundError:
            if not published:
                raise
            outcomes = []  # no server is running: publishing was the purpose
    if json_:
        seat_results = [outcome.as_json() for outcome in outcomes]
        print_json({"files": names, "seats": seat_results, "starters": published})
    elif outcomes:
        complete = sum(not outcome.error for outcome in outcomes)
        servers = count_text(len(outcomes), "server")
        click.echo(f"all files from handouts/ are on {complete} of {servers}")
        starter_output.print_delivered(outcomes)
        course_results.print_failures(outcomes)
    ctx.exit(1 if any(outcome.error for outcome in outcomes) else 0)


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
        print_message(summary_text(answers))
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

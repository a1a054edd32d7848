"""The commands course status, ssh, logs and explain: they read servers and change none."""

from __future__ import annotations

import codecs
import sys
from typing import TYPE_CHECKING

import click

from labctl import shell
from labctl.cli.course import open_course
from labctl.cli.course_jobs import print_jobs, require_queue
from labctl.cli.course_options import make_staff, names_by_seat, only_options, select_seats
from labctl.cli.exit_codes import clean
from labctl.cli.fan_out import run_on_servers
from labctl.cli.options import (
    FOLLOW,
    SSH_AT_ONCE,
    SSH_JSON,
    TAIL,
    json_option,
    require_name,
    stop_drawing,
)
from labctl.cli.plain_ssh import replace_with_ssh
from labctl.cli.runs import write_log
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message, read_output_width
from labctl.errors import UsageError, assign_subject
from labctl.lazy import lazy_imports
from labctl.text import count_text, dollars_text, duration_text, optional_text, price_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from labctl.courses.records.folder import Seat
    from labctl.courses.status import CourseStatus, SeatStatus

with lazy_imports(__name__):
    from labctl.cli import explain
    from labctl.courses import broadcast, context, status
    from labctl.insight import explanation as explanations
    from labctl.lifecycle import reconcile
    from labctl.runs import runs

# columns from which the table has the names and the server's type
WIDE = 100


@click.command("status")
@only_options
@click.option("--refresh", "-r", is_flag=True, help="Query the provider and every server now.")
@click.option("--jobs", is_flag=True, help="Also show how each seat's jobs in Slurm ended.")
@json_option
@click.pass_context
def status_command(
    ctx: click.Context, only: str, group: str, refresh: bool, jobs: bool, json_: bool
) -> None:
    """Show each seat's server, run, time left and cost.

    It shows the last known state. With --refresh, labctl queries the provider and every server
    first.

    \b
    labctl course status
    labctl course status --refresh --group lab-1
    """
    course = open_course(ctx, quiet=json_)
    if jobs:
        require_queue(course.folder)
    unneeded = () if only or group else course.folder.list_unneeded_seats()
    seats = [*select_seats(course, only, group), *unneeded]
    course_now = status.read_status(make_staff(course), seats, refresh=refresh)
    stop_drawing(ctx)
    if json_:
        print_json(course_now)
    else:
        _print_status(course_now, names_by_seat(course.folder), refreshed=refresh)
        if jobs:
            print_jobs(course_now)
        _print_unneeded(unneeded)
    ctx.exit(1 if any(seat.error for seat in course_now.seats) else 0)


def _print_unneeded(seats: Sequence[Seat]) -> None:
    """Print servers without a seat in the roster: their students left or changed teams."""
    if not seats:
        return
    selection = ",".join(seat.name if seat.students else f"former:{seat.name}" for seat in seats)
    names = ", ".join(seat.name for seat in seats)
    print_message(f"No longer needed (students left or changed teams): {names}")
    print_message(f"  next: labctl course down --only {selection}")


def _print_status(course: CourseStatus, names: dict[str, str], *, refreshed: bool) -> None:
    wide = read_output_width() >= WIDE
    headings = (
        "SEAT",
        *(("NAME",) if wide else ()),
        "STATE",
        *(("TYPE",) if wide else ()),
        "UP",
        "LEFT",
        "COST",
        "BUDGET",
        *(("GPU MINUTES",) if any(seat.gpu_minutes for seat in course.seats) else ()),
        "ACTIVITY",
    )
    print_table(
        [_seat_cells(seat, names if wide else None, course.now) for seat in course.seats], headings
    )
    per_hour = f" at {price_text(course.usd_per_hour)}" if course.usd_per_hour else ""
    click.echo()
    click.echo(
        f"{course.running} of {count_text(len(course.seats), 'seat')} "
        f"{'has' if 1 in (course.running, len(course.seats)) else 'have'} a server; "
        f"{dollars_text(course.spent_usd)} so far{per_hour}"
    )
    for seat in course.seats:
        if seat.error:
            print_message(f"{clean(seat.seat)}: {clean(seat.error)}")
    if not refreshed or any(seat.error for seat in course.seats):
        _print_age(course)
    if any(seat.state == "elsewhere" for seat in course.seats):
        print_message("elsewhere: created by another machine")
        print_message("  next: labctl course status --refresh")


def _print_age(course: CourseStatus) -> None:
    """Print how old the shown reports of the servers are."""
    ages = [course.now - (seat.heard_at or 0) for seat in course.seats if seat.heard_at]
    if not ages:
        return
    newest, oldest = duration_text(min(ages)), duration_text(max(ages))
    span = newest if newest == oldest else f"{newest} to {oldest}"
    text = f"as reported {span} ago; to query every server now: labctl course status --refresh"
    print_message(text)


def _seat_cells(seat: SeatStatus, names: dict[str, str] | None, now: float) -> tuple[str, ...]:

    kind = f"{seat.type}{' spot' if seat.spot else ''}" or "-"
    left = "-" if seat.state == "stopped" else optional_text(seat.ttl_left_s, duration_text)
    budget = optional_text(seat.budget_usd, dollars_text)
    return (
        seat.seat,
        *((names.get(seat.seat, "-"),) if names is not None else ()),
        "-" if seat.state == "none" else seat.state,
        *((kind,) if names is not None else ()),
        duration_text(seat.up_s) if seat.up_s else "-",
        left,
        dollars_text(seat.spent_usd),
        budget,
        *((str(seat.gpu_minutes),) if seat.gpu_minutes else ()),
        _activity_text(seat, now),
    )


def _activity_text(seat: SeatStatus, now: float) -> str:

    if seat.error:
        return f"! {seat.error}"
    if seat.refused:
        return f"! {seat.refused}"
    if seat.silent and seat.heard_at is not None:
        return f"unknown, last report {duration_text(now - seat.heard_at)} ago"
    run = seat.run
    if run is not None and not run.has_ended:
        step, total = run.progress.get("step"), run.progress.get("total_steps")
        steps = "" if step is None else f" step {step:.0f}" + (f"/{total:.0f}" if total else "")
        reason = f"; {run.summary}" if run.state_text == "queued" and run.summary else ""
        return f"{run.id} {run.state_text}{steps}{reason}"
    idle = f"idle {duration_text(seat.idle_s)}" if seat.idle_s else ""
    last = f"{run.id} {run.summary or run.state_text}" if run is not None else ""
    return "; ".join(filter(None, [idle, last])) or "-"


@click.command(
    "ssh",
    # Everything after the first word of COMMAND belongs to COMMAND.
    context_settings={"allow_interspersed_args": False},
)
@click.option("--all", "all_", is_flag=True, help="Run COMMAND on every server.")
@only_options
@SSH_AT_ONCE
@SSH_JSON
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[NAME] [-- COMMAND]")
@click.pass_context
def ssh_command(
    ctx: click.Context,
    all_: bool,
    only: str,
    group: str,
    at_once: int,
    json_: bool,
    words: tuple[str, ...],
) -> None:
    """Open a shell on NAME's server, or run COMMAND there.

    With --all, --only or --group, COMMAND runs on all of these servers in parallel. Exits with
    COMMAND's exit code (the highest of all servers), or with 255 if a server could not be reached.

    \b
    labctl course ssh alice
    labctl course ssh alice -- nvidia-smi
    labctl course ssh --all -- df -h /
    labctl course ssh --all --group lab-1 -- uptime
    """
    if all_ or only or group:
        if not words:
            raise _make_no_command_error(only, group)
        ctx.exit(_run_on_all(ctx, only, group, at_once, json_, words))
    if not words:
        raise UsageError("no student or team was named", hint="labctl course ssh NAME")
    if json_:
        raise UsageError(
            "--json needs --all, --only or --group",
            hint="labctl course ssh --all --json -- COMMAND",
        )
    course = open_course(ctx)
    staff = make_staff(course)
    seat = course.folder.find_seat(words[0])
    status.find_server(staff, seat)
    command = words[1:]
    if command[:1] == ("--",):
        command = command[1:]
    tty = not command or (sys.stdin.isatty() and sys.stdout.isatty())
    context = status.build_seat_context(staff, seat)
    with assign_subject(context.subject):
        replace_with_ssh(context, _command_line(command), tty=tty)


def _make_no_command_error(only: str, group: str) -> UsageError:
    selection = [*(("--only", only) if only else ()), *(("--group", group) if group else ())]
    call = shell.command("labctl", "course", "ssh", *(selection or ("--all",)), "--", "uptime")
    return UsageError(
        "no command was given",
        why="--all, --only and --group run one command on every selected server",
        hint=f"{call.render()}\nlabctl course ssh NAME   # a shell",
    )


def _command_line(words: tuple[str, ...]) -> str:
    """Return a line for the server's shell: one word as it is, as with ssh; several are quoted."""
    return words[0] if len(words) == 1 else shell.command(*words).render()


def _run_on_all(
    ctx: click.Context, only: str, group: str, at_once: int, json_: bool, words: tuple[str, ...]
) -> int:
    course = open_course(ctx, quiet=json_)
    pairs = status.list_running_servers(make_staff(course), select_seats(course, only, group))
    named = [(seat.name, server) for seat, server in pairs]
    subjects = [context.make_subject(seat) for seat, _ in pairs]
    return run_on_servers(course.paths, named, _command_line(words), at_once, json_, subjects)


@click.command("logs")
@click.argument("name")
@click.argument("run", default="", callback=require_name)
@FOLLOW
@TAIL
@click.pass_context
def logs_command(ctx: click.Context, name: str, run: str, follow: bool, tail: int) -> None:
    """Print the output of NAME's RUN (default: the latest run), from any of their labs.

    \b
    labctl course logs alice
    labctl course logs alice -f
    """
    course = open_course(ctx)
    lab, server, latest = broadcast.find_run(make_staff(course), course.folder.find_seat(name), run)
    write = make_safe_log_writer()
    try:
        with assign_subject(lab.subject):
            shown = runs.watch(lab, server, latest.id, tail=tail, follow=follow, on_log=write)
    except KeyboardInterrupt:
        print_message(f"\nrun {latest.id} is still running")
        ctx.exit(130)
    if shown.has_ended:
        print_message(f"run {shown.id}: {clean(shown.summary)}")


def make_safe_log_writer() -> Callable[[bytes], None]:
    """Return a function that writes the log of a program that is not trusted.

    Into a file or a pipe the bytes go unchanged. A terminal must not be steered, so control
    characters are made visible there.
    """
    if not sys.stdout.isatty():
        return write_log
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write_clean(block: bytes) -> None:
        parts = decoder.decode(block).split("\r")  # keep progress bars working
        click.echo("\r".join(map(clean, parts)), nl=False)

    return write_clean


@click.command("explain")
@click.argument("name")
@click.argument("run", default="", callback=require_name)
@click.option("--all", "-a", "everything", is_flag=True, help="Also explain good results.")
@json_option
@click.pass_context
def explain_command(ctx: click.Context, name: str, run: str, everything: bool, json_: bool) -> None:
    """Explain why NAME's RUN (default: the latest) is slow or wrong, like `labctl explain`.

    \b
    labctl course explain alice
    """
    course = open_course(ctx, quiet=json_)
    lab, _, latest = broadcast.find_run(make_staff(course), course.folder.find_seat(name), run)
    with assign_subject(lab.subject):
        explanation = explanations.explain(lab, reconcile.fetch_logs(lab, latest.id))
    stop_drawing(ctx)
    if json_:
        print_json(explanation)
    else:
        explain.print_explanation(explanation, everything)

"""course status, ssh, logs, explain: looking at servers, changing none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import chosen, only_options, staff_of
from labctl.cli.options import json_option, rest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from labctl.courses.records.folder import Seat
    from labctl.courses.status import CourseNow, SeatNow

NARROW = 100


@click.command("status")
@only_options
@click.option("--refresh", "-r", is_flag=True, help="Ask the provider and every server now.")
@json_option
@click.pass_context
def status_command(ctx: click.Context, only: str, group: str, refresh: bool, json_: bool) -> None:
    """Every seat's server, clocks and dollars; from the ledger, or with --refresh as of now.

    \b
    labctl course status
    labctl course status --refresh --group lab-1
    """
    from labctl.cli.screen import as_json
    from labctl.courses.status import status

    course = open_course(ctx, quiet=json_)
    unneeded = () if only or group else course.folder.unneeded_seats()
    seats = [*chosen(course, only, group), *unneeded]
    found = status(staff_of(course), seats, refresh=refresh)
    rest(ctx)
    if json_:
        as_json({name: getattr(found, name) for name in found.__struct_fields__})
    else:
        _draw(found)
        _draw_unneeded(unneeded)
    ctx.exit(1 if any(one.error for one in found.seats) else 0)


def _draw_unneeded(seats: Sequence[Seat]) -> None:
    """Servers of students who left or changed teams: the roster has no seat for them any more."""
    if not seats:
        return
    names = ",".join(one.name if one.students else f"former:{one.name}" for one in seats)
    shown = ", ".join(one.name for one in seats)
    click.echo(f"No longer needed (students left or changed teams): {shown}", err=True)
    click.echo(f"  next: labctl course down --only {names}", err=True)


def _draw(found: CourseNow) -> None:
    import shutil

    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import table

    wide = shutil.get_terminal_size((100, 24)).columns >= NARROW
    headings = ("SEAT", "STATE", *(("TYPE",) if wide else ()), "UP", "LEFT", "USD", "OF", "DOES")
    table([_row(one, found.now, wide) for one in found.seats], headings)
    per_hour = f" at {found.usd_per_hour:.2f} an hour" if found.usd_per_hour else ""
    click.echo()
    click.echo(
        f"{found.running} of {len(found.seats)} seats have a server; "
        f"{found.spent_usd:.2f} dollars so far{per_hour}"
    )
    for one in found.seats:
        if one.error:
            click.echo(f"{clean(one.seat)}: {clean(one.error)}", err=True)
    if any(one.state == "elsewhere" for one in found.seats):
        said = "elsewhere: made by another machine; next: labctl course status --refresh"
        click.echo(said, err=True)


def _row(one: SeatNow, now: float, wide: bool) -> tuple[str, ...]:
    from labctl.cli.screen import span

    kind = f"{one.type}{' spot' if one.spot else ''}" or "-"
    left = "-" if one.ttl_left_s is None else span(one.ttl_left_s)
    budget = "-" if one.budget_usd is None else f"{one.budget_usd:.2f}"
    return (
        one.seat,
        "-" if one.state == "none" else one.state,
        *((kind,) if wide else ()),
        span(one.up_s) if one.up_s else "-",
        left,
        f"{one.spent_usd:.2f}",
        budget,
        _doing(one, now),
    )


def _doing(one: SeatNow, now: float) -> str:
    from labctl.cli.screen import span

    if one.error:
        return f"! {one.error}"
    run = one.run
    if run is not None and not run.ended:
        step, total = run.progress.get("step"), run.progress.get("total_steps")
        at = "" if step is None else f" step {step:.0f}" + (f"/{total:.0f}" if total else "")
        return f"{run.id} {run.state}{at}"
    idle = f"idle {span(one.idle_s)}" if one.idle_s else ""
    last = f"{run.id} {run.told or run.state}" if run is not None else ""
    return "; ".join(filter(None, [idle, last])) or "-"


@click.command(
    "ssh",
    # What follows COMMAND's first word is COMMAND's.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--all", "all_", is_flag=True, help="COMMAND on every server, not a shell.")
@only_options
@click.option(
    "--at-once", default=32, show_default=True, type=click.IntRange(1, 256), help="With --all."
)
@click.option("--json", "json_", is_flag=True, help="With --all: one JSON object.")
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
    """A shell on NAME's server, or COMMAND there; with --all COMMAND on every server.

    Exits with COMMAND's code, with --all the largest; 255 where a server was not reached.

    \b
    labctl course ssh alice
    labctl course ssh alice -- nvidia-smi
    labctl course ssh --all -- df -h /
    labctl course ssh --all --group lab-1 -- uptime
    """
    from labctl.errors import UsageError

    if all_ or only or group:
        if not words:
            raise UsageError("--all needs a command", hint="labctl course ssh --all -- uptime")
        ctx.exit(_on_all(ctx, only, group, at_once, json_, words))
    if not words:
        raise UsageError("on whose server?", hint="labctl course ssh NAME")
    if json_:
        raise UsageError("--json goes with --all", hint="labctl course ssh --all --json -- COMMAND")
    from labctl.cli.runs import become_ssh
    from labctl.courses.status import ground_of, server_of

    course = open_course(ctx)
    staff = staff_of(course)
    seat = course.folder.seat(words[0])
    server_of(staff, seat)
    command = words[1:]
    if command[:1] == ("--",):
        command = command[1:]
    tty = not command or (sys.stdin.isatty() and sys.stdout.isatty())
    become_ssh(ground_of(staff, seat), _line(command), tty=tty)


def _line(words: tuple[str, ...]) -> str:
    """One word is a line for the shell there, as with ssh; several are argv, each kept whole."""
    from labctl.shell import command

    return words[0] if len(words) == 1 else command(*words).render()


def _on_all(
    ctx: click.Context, only: str, group: str, at_once: int, json_: bool, words: tuple[str, ...]
) -> int:
    import msgspec

    from labctl.cli.fan_out import draw, exit_code, summary
    from labctl.cli.screen import as_json
    from labctl.courses.status import servers_of
    from labctl.servers.connections import Connections
    from labctl.servers.fan_out import Answer, run_everywhere

    course = open_course(ctx, quiet=json_)
    found = servers_of(staff_of(course), chosen(course, only, group))
    width = max(len(seat.name) for seat, _ in found)
    names = {server.id: seat.name for seat, server in found}

    def named(answer: Answer) -> Answer:
        return msgspec.structs.replace(answer, alias=names[answer.server_id])

    answers = run_everywhere(
        Connections(course.paths.ssh_dir, course.paths.user_ssh_config),
        [server for _, server in found],
        _line(words),
        at_once=at_once,
        tell=(lambda answer: None) if json_ else (lambda answer: draw(named(answer), width)),
    )
    told = [named(answer) for answer in answers]
    if json_:
        as_json({"servers": told})
    else:
        click.echo(summary(told), err=True)
    return exit_code(told)


@click.command("logs")
@click.argument("name")
@click.argument("run", default="")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("-n", "--tail", default=0, metavar="LINES", help="So many lines before the end.")
@click.pass_context
def logs_command(ctx: click.Context, name: str, run: str, follow: bool, tail: int) -> None:
    """What NAME's RUN (the latest) printed, in whichever lab of theirs it is.

    \b
    labctl course logs alice
    labctl course logs alice -f
    """
    from labctl.cli.exit_codes import clean
    from labctl.courses.broadcast import run_of
    from labctl.runs import runs

    course = open_course(ctx)
    lab, server, found = run_of(staff_of(course), course.folder.seat(name), run)
    try:
        seen = runs.watch(lab, server, found.id, tail=tail, follow=follow, on_log=strangers_log())
    except KeyboardInterrupt:
        click.echo(f"\nrun {found.id} goes on", err=True)
        ctx.exit(130)
    if seen.ended:
        click.echo(f"run {seen.id}: {clean(seen.told)}", err=True)


def strangers_log() -> Callable[[bytes], None]:
    """Writes what a stranger's program printed: into a file as it came; a terminal it must not
    steer, so that there its control characters are made visible."""
    import codecs

    from labctl.cli.exit_codes import clean
    from labctl.cli.runs import write_log

    if not sys.stdout.isatty():
        return write_log
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(block: bytes) -> None:
        parts = decoder.decode(block).split("\r")  # progress bars stay what they are
        click.echo("\r".join(map(clean, parts)), nl=False)

    return show


@click.command("explain")
@click.argument("name")
@click.argument("run", default="")
@click.option("--all", "-a", "everything", is_flag=True, help="More words, on what is good too.")
@json_option
@click.pass_context
def explain_command(ctx: click.Context, name: str, run: str, everything: bool, json_: bool) -> None:
    """Why NAME's RUN (the latest) is slow or wrong, as `labctl explain` tells a student.

    \b
    labctl course explain alice
    """
    from labctl.cli.explain import draw
    from labctl.cli.screen import as_json
    from labctl.courses.broadcast import run_of
    from labctl.insight.explanation import explain
    from labctl.lifecycle.reconcile import bring_logs

    course = open_course(ctx, quiet=json_)
    lab, _, found = run_of(staff_of(course), course.folder.seat(name), run)
    said = explain(lab, bring_logs(lab, found.id))
    rest(ctx)
    if json_:
        as_json({key: getattr(said, key) for key in said.__struct_fields__})
    else:
        draw(said, everything)

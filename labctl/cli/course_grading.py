"""course collect and grade: what was handed in, and what it is worth."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import chosen, only_options, staff_of
from labctl.cli.options import SCREEN, json_option, yes_option

if TYPE_CHECKING:
    from labctl.courses.collect import Collection, Handed
    from labctl.courses.grading_run import Graded, Grading

TEMPORARY = 75
STATES = {
    "in": ("in", "green"),
    "missing": ("nothing", "dim"),
    "damaged": ("damaged", "red"),
    "closed": ("too late", "yellow"),
    "graded": ("graded", "green"),
    "failed": ("failed", "yellow"),
    "error": ("not graded", "red"),
}
PROFILE = click.option("--profile", default="", help="For hand-ins in a bucket: of ~/.aws/config.")


@click.command("collect", short_help="Fetch and verify what was handed in.")
@click.argument("name", metavar="ASSIGNMENT")
@only_options
@PROFILE
@json_option
@click.pass_context
def collect_command(
    ctx: click.Context, name: str, only: str, group: str, profile: str, json_: bool
) -> None:
    """Fetch what was handed in for ASSIGNMENT and hold every bundle against its signed receipt.

    Shows which submission of each seat counts: the last one within the rules, extensions included.
    Exits with 1 where a bundle or a receipt was changed after it was signed.

    \b
    labctl course collect hw3
    labctl course collect hw3 --only alice,bob
    """
    from labctl.cli.screen import as_json
    from labctl.courses.collect import collect

    course = open_course(ctx, quiet=json_)
    staff = staff_of(course, ctx.meta[SCREEN])
    seats = chosen(course, only, group, name) if only or group else ()
    found = collect(course.folder, name, seats, profile=profile, by=staff.by)
    if json_:
        as_json({"assignment": name, "collection": found})
    else:
        _draw_collection(found)
    ctx.exit(1 if found.damaged else 0)


def _draw_collection(found: Collection) -> None:
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import size, table

    rows = [
        (
            one.seat,
            _state(one.state)[0],
            one.received,
            _late(one),
            str(one.submissions or ""),
            size(one.size) if one.size else "",
            clean(one.why),
        )
        for one in found.handed
    ]
    heads = ("SEAT", "STATE", "RECEIVED", "LATE", "TIMES", "SIZE", "")
    table(rows, heads, shutil.get_terminal_size().columns)
    late = sum(1 for one in found.here if one.late_s)
    click.echo(f"{len(found.here)} of {len(found.handed)} handed in, {late} of them late.")
    if found.fetched or found.refused:
        click.echo(f"{found.fetched} came out of the bucket, {len(found.refused)} were refused.")
    for text in (*found.refused, *found.damaged):
        click.echo(click.style(clean(text), fg="red"), err=True)
    if found.strangers:
        names = ", ".join(found.strangers)
        click.echo(f"in no seat of this course, left alone: {clean(names)}", err=True)
    if found.here:
        click.echo(f"next: labctl course grade {found.assignment}", err=True)


def _state(state: str) -> tuple[str, str]:
    return STATES.get(state, (state, "white"))


def _late(one: Handed) -> str:
    from labctl.courses.grading.results import late_text

    if not one.late_s:
        return ""
    return late_text(one.late_s) + (f", {one.penalty}% off" if one.penalty else "")


@click.command("grade", short_help="Run every submitted model on the hidden set, sealed.")
@click.argument("name", metavar="ASSIGNMENT")
@only_options
@click.option("--again", is_flag=True, help="Run what has a grade already, too.")
@click.option("--keep-server", is_flag=True, help="Leave the grading server as it is afterwards.")
@click.option(
    "--at-once",
    default=1,
    show_default=True,
    type=click.IntRange(1, 32),
    help="So many submissions beside each other.",
)
@click.option("--release", is_flag=True, help="Show the feedback to students, once all is graded.")
@PROFILE
@yes_option
@json_option
@click.pass_context
def grade_command(ctx: click.Context, /, **options: Any) -> None:
    """Grade what was handed in for ASSIGNMENT, on the server that course.yaml names for it.

    Each submission runs in two containers without network: the first has the student's code and
    model and the inputs, and writes predictions; the second has staff's grader and the labels.
    One that fails stops no other. Run it again to go on: what is graded stays. Without --release
    students see nothing of it.

    \b
    labctl course grade hw3
    labctl course grade hw3 --only alice --again
    labctl course grade hw3 --release
    """
    from labctl.cli.course_grades import draw_unreleased
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import as_json
    from labctl.courses.grades import grades
    from labctl.courses.grading_run import grade
    from labctl.courses.release import release

    name, json_ = options["name"], options["json_"]
    course = open_course(ctx, yes=options["yes"], quiet=json_)
    staff = staff_of(course, ctx.meta[SCREEN])
    only, group = options["only"], options["group"]
    seats = chosen(course, only, group, name) if only or group else ()
    found = grade(
        staff,
        name,
        seats,
        again=options["again"],
        keep=options["keep_server"],
        at_once=options["at_once"],
        profile=options["profile"],
        tell=(lambda _: None) if json_ else _say,
    )
    ctx.meta[SCREEN].rest()
    if not json_:
        _draw_grading(found)
    wanted = options["release"] and found.whole
    screen = ctx.meta[SCREEN]
    released = release(course.folder, name, seats, by=staff.by, reporter=screen) if wanted else None
    if json_:
        as_json({"assignment": name, "grading": found, "released": released})
    else:
        if released:
            for change in released.changes:
                click.echo(f"changed: {clean(change)}")
            click.echo(f"feedback released to: {', '.join(released.students)}")
        elif options["release"]:
            click.echo("nothing was released: not all of it is graded", err=True)
        draw_unreleased(name, grades(course.folder, name))
    ctx.exit(TEMPORARY if found.unreached else 0 if found.whole else 1)


def _say(one: Graded) -> None:
    """A line as soon as a submission is through; what had its grade already says nothing."""
    from labctl.cli.exit_codes import clean

    if one.fresh and one.record is not None:
        word, colour = _state(one.state)
        score = "" if one.record.score is None else f"{one.record.score:g}"
        text = f"{one.seat:<20} {click.style(word, fg=colour)} {score}"
        click.echo(
            f"{text}  {clean(one.why.splitlines()[0] if one.why else '')}".rstrip(), err=True
        )


def _draw_grading(found: Grading) -> None:
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import table

    rows = [_row(one) for one in found.seats]
    heads = ("SEAT", "STATE", "POINTS", "CLAIM", "MEASURED", "NOTE")
    table(rows, heads, shutil.get_terminal_size().columns)
    flagged = [one for one in found.seats if one.record and one.record.flags]
    if flagged:
        click.echo("\nWhat a person should look at; none of it is a verdict:")
    for one in flagged:
        for flag in one.record.flags if one.record else ():
            evidence = f": {flag.evidence}" if flag.evidence else ""
            click.echo(f"  {one.seat}  {clean(flag.what)}{clean(evidence)}")
    _draw_ends(found)


def _row(one: Graded) -> tuple[str, ...]:
    state, made = _state(one.state)[0], one.record
    why = one.why.splitlines()[0] if one.why else ""
    if made is None:
        return one.seat, state, "", "", "", why
    late = f" -{made.penalty}%" if made.penalty and made.raw and made.raw.score else ""
    score = "" if made.score is None else f"{made.score:g}/{made.points:g}{late}"
    shares = (made.comparison.claimed, made.comparison.measured)
    claimed, measured = ("" if value is None else f"{value:.4f}" for value in shares)
    kinds = [flag.kind for flag in made.flags]
    note = ", ".join(dict.fromkeys([why, *kinds] if why else kinds))
    return one.seat, state, score, claimed, measured, note


def _draw_ends(found: Grading) -> None:
    from labctl.cli.exit_codes import clean

    counts = {state: sum(1 for one in found.seats if one.state == state) for state in STATES}
    fresh = sum(1 for one in found.seats if one.fresh)
    text = f"{counts['graded']} graded ({fresh} now), {counts['failed']} failed"
    click.echo(f"{text}, {counts['error']} not graded, {counts['missing']} handed in nothing.")
    for one in found.seats:
        for owner in one.corrected:
            text = f"{owner}: results.json was edited by hand and stays as it is"
            click.echo(clean(text), err=True)
    if counts["error"]:
        click.echo(f"next: labctl course grade {found.assignment}   # tries those again", err=True)
    if found.unreached:
        names = ", ".join(found.unreached)
        click.echo(f"the grading server was lost before: {names}", err=True)
        click.echo(f"  {clean(found.why)}", err=True)
        click.echo(f"  next: labctl course grade {found.assignment}   # goes on", err=True)

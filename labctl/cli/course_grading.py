"""The commands course collect and course grade: submissions and their grading."""

from __future__ import annotations

import shutil
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.course import open_course
from labctl.cli.course_grades import print_unreleased_changes
from labctl.cli.course_options import (
    make_staff,
    names_by_seat,
    only_options,
    print_grace,
    select_seats,
)
from labctl.cli.exit_codes import clean
from labctl.cli.options import PROFILE, SCREEN, json_option, yes_option
from labctl.cli.screen import print_json, print_table
from labctl.courses import collect
from labctl.courses.grades import list_grades
from labctl.courses.grading.results import late_text
from labctl.courses.records.timetable import find_zone
from labctl.courses.release import release_grades
from labctl.lazy import lazy_imports
from labctl.text import bytes_text

if TYPE_CHECKING:
    from datetime import tzinfo

    from labctl.courses.grading_run import GradingResult, SeatGrade
    from labctl.courses.records.folder import CourseFolder

with lazy_imports(__name__):
    from labctl.courses import grading_run

TEMPORARY = 75
STATES = {
    "in": ("in", "green"),
    "missing": ("missing", "dim"),
    "damaged": ("damaged", "red"),
    "closed": ("too late", "yellow"),
    "graded": ("graded", "green"),
    "failed": ("failed", "yellow"),
    "error": ("not graded", "red"),
}


@click.command("collect", short_help="Fetch and verify submissions.")
@click.argument("name", metavar="ASSIGNMENT")
@only_options
@PROFILE
@json_option
@click.pass_context
def collect_command(
    ctx: click.Context, name: str, only: str, group: str, profile: str, json_: bool
) -> None:
    """Fetch the submissions for ASSIGNMENT and compare every bundle with its signed receipt.

    For each seat, the table shows the submission that counts: the last one that meets the rules,
    extensions included. Exits with 1 if a bundle or a receipt was changed after it was signed.

    \b
    labctl course collect hw3
    labctl course collect hw3 --only alice,bob
    """
    course = open_course(ctx, quiet=json_)
    staff = make_staff(course, ctx.meta[SCREEN])
    seats = select_seats(course, only, group, name) if only or group else ()
    collection = collect.collect(course.folder, name, seats, profile=profile, by=staff.by)
    if json_:
        print_json({"assignment": name, "collection": collection})
    else:
        _print_collection(collection, course.folder)
    ctx.exit(1 if collection.damaged else 0)


def _print_collection(collection: collect.Collection, folder: CourseFolder) -> None:
    names, zone = names_by_seat(folder), find_zone(folder.config)
    rows = [
        (
            submission.seat,
            names.get(submission.seat, "-"),
            _state_style(submission.state)[0],
            _received_text(submission.received, zone),
            _late_text(submission),
            str(submission.submissions or ""),
            bytes_text(submission.size) if submission.size else "",
            clean(submission.why),
        )
        for submission in collection.submissions
    ]
    headings = ("SEAT", "NAME", "STATE", f"RECEIVED ({zone})", "LATE", "COUNT", "SIZE", "")
    print_table(rows, headings, shutil.get_terminal_size().columns)
    count, late = len(collection.accepted), sum(1 for one in collection.accepted if one.late_s)
    click.echo(f"{count} of {len(collection.submissions)} submitted, {late} of them late.")
    print_grace(folder, collection.assignment)
    if collection.fetched or collection.refused:
        refused = len(collection.refused)
        click.echo(f"Fetched {collection.fetched} from the bucket, refused {refused}.")
    for text in (*collection.refused, *collection.damaged):
        click.echo(click.style(clean(text), fg="red"), err=True)
    if collection.strangers:
        strangers = ", ".join(collection.strangers)
        click.echo(f"ignored, no seat in this course: {clean(strangers)}", err=True)
    if collection.accepted:
        click.echo(f"next: labctl course grade {collection.assignment}", err=True)


def _state_style(state: str) -> tuple[str, str]:
    """Return the text and the color of a state."""
    return STATES.get(state, (state, "white"))


def _received_text(received: str, zone: tzinfo) -> str:
    """Write a receipt's time in the course's zone."""
    if not received:
        return ""
    return f"{datetime.fromisoformat(received).astimezone(zone):%d %b %H:%M:%S}"


def _late_text(submission: collect.SeatSubmission) -> str:
    if submission.in_grace_s:
        return f"{late_text(submission.in_grace_s)}, in grace"
    if not submission.late_s:
        return ""
    penalty = f", {submission.penalty}% off" if submission.penalty else ""
    return late_text(submission.late_s) + penalty


@click.command("grade", short_help="Run every submitted model on the hidden test set.")
@click.argument("name", metavar="ASSIGNMENT")
@only_options
@click.option("--again", is_flag=True, help="Also run submissions that already have a grade.")
@click.option("--keep-server", is_flag=True, help="Keep the grading server afterwards.")
@click.option(
    "--at-once",
    default=1,
    show_default=True,
    type=click.IntRange(1, 32),
    help="Grade this many submissions at a time.",
)
@click.option("--release", is_flag=True, help="Show students the feedback if all are graded.")
@PROFILE
@yes_option
@json_option
@click.pass_context
def grade_command(ctx: click.Context, /, **options: Any) -> None:
    """Grade the submissions for ASSIGNMENT on the grading server from course.yaml.

    Two containers without a network grade each submission. The first runs the student's code and
    model on the inputs, and writes predictions. The second runs the staff's grader on these
    predictions and the labels. A failed submission does not stop the others. To continue after an
    interruption, run the command again: existing grades are kept. Without --release, students see
    nothing.

    \b
    labctl course grade hw3
    labctl course grade hw3 --only alice --again
    labctl course grade hw3 --release
    """
    name, json_ = options["name"], options["json_"]
    course = open_course(ctx, yes=options["yes"], quiet=json_)
    staff = make_staff(course, ctx.meta[SCREEN])
    only, group = options["only"], options["group"]
    seats = select_seats(course, only, group, name) if only or group else ()
    grading = grading_run.grade_assignment(
        staff,
        name,
        seats,
        again=options["again"],
        keep=options["keep_server"],
        at_once=options["at_once"],
        profile=options["profile"],
        on_result=(lambda _: None) if json_ else _print_grade,
    )
    ctx.meta[SCREEN].stop_drawing()
    if not json_:
        _print_grading(grading, names_by_seat(course.folder))
    may_release = options["release"] and grading.is_complete
    screen = ctx.meta[SCREEN]
    released = (
        release_grades(course.folder, name, seats, by=staff.by, reporter=screen)
        if may_release
        else None
    )
    if json_:
        print_json({"assignment": name, "grading": grading, "released": released})
    else:
        if released:
            for change in released.changes:
                click.echo(f"changed: {clean(change)}")
            click.echo(f"feedback released to: {', '.join(released.students)}")
        elif options["release"]:
            click.echo("nothing was released: some submissions are not graded", err=True)
        print_unreleased_changes(name, list_grades(course.folder, name))
    ctx.exit(TEMPORARY if grading.unreached else 0 if grading.is_complete else 1)


def _print_grade(graded: SeatGrade) -> None:
    """Print a line for a submission that was graded now; nothing if it already had a grade."""
    if graded.fresh and graded.record is not None:
        state, color = _state_style(graded.state)
        score = "" if graded.record.score is None else f"{graded.record.score:g}"
        text = f"{graded.seat:<20} {click.style(state, fg=color)} {score}"
        why = graded.why.splitlines()[0] if graded.why else ""
        click.echo(f"{text}  {clean(why)}".rstrip(), err=True)


def _print_grading(grading: GradingResult, names: dict[str, str]) -> None:
    rows = [
        (graded.seat, names.get(graded.seat, "-"), *_graded_cells(graded))
        for graded in grading.seats
    ]
    headings = ("SEAT", "NAME", "STATE", "POINTS", "CLAIM", "MEASURED", "NOTE")
    print_table(rows, headings, shutil.get_terminal_size().columns)
    flagged = [graded for graded in grading.seats if graded.record and graded.record.flags]
    if flagged:
        click.echo("\nPlease review (not proof of misconduct):")
    for graded in flagged:
        for flag in graded.record.flags if graded.record else ():
            evidence = f": {flag.evidence}" if flag.evidence else ""
            click.echo(f"  {graded.seat}  {clean(flag.what)}{clean(evidence)}")
    _print_totals(grading)


def _graded_cells(graded: SeatGrade) -> tuple[str, ...]:
    state, record = _state_style(graded.state)[0], graded.record
    why = graded.why.splitlines()[0] if graded.why else ""
    if record is None:
        return state, "", "", "", why
    late = f" -{record.penalty}%" if record.penalty and record.raw and record.raw.score else ""
    score = "" if record.score is None else f"{record.score:g}/{record.points:g}{late}"
    shares = (record.comparison.claimed, record.comparison.measured)
    claimed, measured = ("" if value is None else f"{value:.4f}" for value in shares)
    kinds = [flag.kind for flag in record.flags]
    note = ", ".join(dict.fromkeys([why, *kinds] if why else kinds))
    return state, score, claimed, measured, note


def _print_totals(grading: GradingResult) -> None:
    seats = grading.seats
    counts = {state: sum(1 for graded in seats if graded.state == state) for state in STATES}
    fresh = sum(1 for graded in seats if graded.fresh)
    text = f"{counts['graded']} graded ({fresh} now), {counts['failed']} failed"
    click.echo(f"{text}, {counts['error']} not graded, {counts['missing']} missing.")
    for graded in seats:
        for owner in graded.corrected:
            text = f"{owner}: results.json was edited by hand and is kept"
            click.echo(clean(text), err=True)
    if counts["error"]:
        click.echo(f"next: labctl course grade {grading.assignment}   # retries those", err=True)
    if grading.unreached:
        names = ", ".join(grading.unreached)
        click.echo(f"the grading server was lost before these were graded: {names}", err=True)
        click.echo(f"  {clean(grading.why)}", err=True)
        click.echo(f"  next: labctl course grade {grading.assignment}   # continues", err=True)

"""The commands course collect and course grade: submissions and their grading."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from labctl.cli.course import open_course
from labctl.cli.course_options import (
    is_wide_screen,
    make_staff,
    names_by_seat,
    only_options,
    print_grace,
    select_seats,
)
from labctl.cli.course_tests import print_dry_run
from labctl.cli.exit_codes import clean, print_next
from labctl.cli.number_range import NumberRange
from labctl.cli.options import PROFILE, SCREEN, json_option, yes_option
from labctl.cli.tables import print_json, print_table
from labctl.cli.unreleased import print_unreleased_changes
from labctl.cli.wrapping import print_message
from labctl.courses import collect
from labctl.courses.grades import list_grades
from labctl.courses.grading.record import OUTPUT, TESTS_OUTPUT
from labctl.courses.records.timetable import find_zone
from labctl.courses.release import release_grades
from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.text import bytes_text, count_text, duration_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import tzinfo

    from labctl.courses.code_folders import CodeFolder
    from labctl.courses.grading_run import GradingResult, SeatGrade
    from labctl.courses.records.folder import CourseFolder
    from labctl.courses.release import ReleaseResult

with lazy_imports(__name__):
    from labctl.courses import code_folders, grading_dry_run, grading_run, marking

TEMPORARY = 75
STATES = {
    "in": ("in", "green"),
    "open": ("not yet", "dim"),
    "missing": ("missing", "dim"),
    "damaged": ("damaged", "red"),
    "closed": ("too late", "yellow"),
    "excused": ("excused", "dim"),
    "graded": ("graded", "green"),
    "failed": ("failed", "yellow"),
    "error": ("not graded", "red"),
}


@click.command("collect", short_help="Fetch and verify submissions.")
@click.argument("name", metavar="ASSIGNMENT")
@only_options
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write each submission's code to this directory, with a diff against the starter.",
)
@PROFILE
@json_option
@click.pass_context
def collect_command(
    ctx: click.Context,
    name: str,
    only: str,
    group: str,
    into: Path | None,
    profile: str,
    json_: bool,
) -> None:
    """Fetch the submissions for ASSIGNMENT and compare every bundle with its signed receipt.

    For each seat, the table shows the submission that counts: the last one that meets the rules,
    extensions included. Exits with 1 if a bundle or a receipt was changed after it was signed.

    \b
    labctl course collect hw3
    labctl course collect hw3 --only alice,bob
    labctl course collect hw3 --into ~/hw3
    """
    course = open_course(ctx, quiet=json_)
    staff = make_staff(course, ctx.meta[SCREEN])
    seats = select_seats(course, only, group, name) if only or group else ()
    collection = collect.collect(course.folder, name, seats, profile=profile, by=staff.by)
    folders = code_folders.write_code_folders(course.folder, collection, into) if into else ()
    if json_:
        written = {"folders": to_builtins(folders, enc_hook=str)} if into else {}
        print_json({"assignment": name, "collection": collection, **written})
    else:
        _print_collection(collection, course.folder)
        if into:
            _print_folders(folders, into)
        _print_next_command(collection, course.folder)
    ctx.exit(1 if collection.damaged else 0)


def _print_collection(collection: collect.Collection, folder: CourseFolder) -> None:
    names, zone = names_by_seat(folder), find_zone(folder.config)
    rows: list[tuple[str, ...]] = [
        (
            submission.seat,
            names.get(submission.seat, "-"),
            _state_style(submission.state)[0],
            _received_text(submission.received, zone),
            _late_text(submission),
            str(submission.submissions or "-"),
            bytes_text(submission.size) if submission.size else "-",
            clean("; ".join(filter(None, [submission.free_days.text, submission.why]))),
        )
        for submission in collection.submissions
    ]
    headings: tuple[str, ...] = ("SEAT", "NAME", "STATE", "RECEIVED", "LATE", "COUNT", "SIZE", "")
    if not is_wide_screen():
        headings, rows = (*headings[:5], ""), [(*row[:5], row[-1]) for row in rows]
    print_table(rows, headings, cut=False)
    count, late = len(collection.accepted), sum(1 for one in collection.accepted if one.late_s)
    excused = sum(one.state == "excused" for one in collection.submissions)
    text = f"{count} of {len(collection.submissions)} submitted, {late} of them late"
    text = f"{text}, {excused} excused." if excused else f"{text}."
    print_message(f"{text} Times are in {zone}.", err=False)
    print_grace(folder, collection.assignment)
    if collection.fetched or collection.refused:
        refused = len(collection.refused)
        click.echo(f"Fetched {collection.fetched} from the bucket, refused {refused}.")
    for text in (*collection.refused, *collection.damaged):
        print_message(clean(text), fg="red")
    if collection.strangers:
        strangers = ", ".join(collection.strangers)
        print_message(f"ignored, because they have no seat in this course: {clean(strangers)}")


def _print_next_command(collection: collect.Collection, folder: CourseFolder) -> None:
    if collection.accepted:
        name = collection.assignment
        is_by_hand = not folder.config.assignments[name].graded_points
        command = f"mark {name} --next" if is_by_hand else f"grade {name}"
        print_message(f"next: labctl course {command}")


def _print_folders(folders: tuple[CodeFolder, ...], into: Path) -> None:
    new = sum(folder.is_new for folder in folders)
    print_message(f"{into}: code of {count_text(len(folders), 'submission')}, {new} of them new")
    if any(folder.diff for folder in folders):
        print_message("  each .diff file compares a submission with the starter files")


def _state_style(state: str) -> tuple[str, str]:
    """Return the text and the color of a state."""
    return STATES.get(state, (state, "white"))


def _received_text(received: str, zone: tzinfo) -> str:
    """Write a receipt's time in the course's zone."""
    if not received:
        return "-"
    return f"{datetime.fromisoformat(received).astimezone(zone):%d %b %H:%M:%S}"


def _late_text(submission: collect.SeatSubmission) -> str:
    if submission.in_grace_s:
        return f"{duration_text(submission.in_grace_s)}, in the grace period"
    if not submission.late_s:
        return "-"
    penalty = f", {submission.penalty}% off" if submission.penalty else ""
    return duration_text(submission.late_s) + penalty


@click.command("grade", short_help="Run every submitted model on the hidden test set.")
@click.argument("name", metavar="ASSIGNMENT")
@only_options
@click.option("--again", is_flag=True, help="Also run submissions that already have a grade.")
@click.option("--keep-server", is_flag=True, help="Keep the grading server afterwards.")
@click.option(
    "--at-once",
    default=1,
    show_default=True,
    type=NumberRange(4, 1, 32),
    help="Grade this many submissions at a time.",
)
@click.option("--release", is_flag=True, help="Show students the feedback if all are graded.")
@click.option(
    "--dry-run", is_flag=True, help="Grade your own reference solution only, and store nothing."
)
@click.option(
    "--accept-failures", is_flag=True, help="Give 0 points even if every submission fails alike."
)
@PROFILE
@yes_option
@json_option
@click.pass_context
def grade_command(ctx: click.Context, /, **options: Any) -> None:
    """Grade the submissions for ASSIGNMENT on the grading server from course.yaml.

    Two containers without a network grade each submission. The first runs the student's code and
    model on the inputs, and writes predictions. The second runs the staff's grader on these
    predictions and the labels. Hidden tests get two more containers. A failed submission does not
    stop the others. To continue after an interruption, run the command again: existing grades are
    kept. Without --release, students see nothing. If every submission fails alike, none gets a
    grade, since the grading image may be the cause; --dry-run tries it with the solution in
    grade.reference of course.yaml, and shows the points of each test.

    \b
    labctl course grade hw3 --dry-run
    labctl course grade hw3
    labctl course grade hw3 --only alice --again
    labctl course grade hw3 --release
    """
    name, json_ = options["name"], options["json_"]
    _require_plain_dry_run(options)
    course = open_course(ctx, yes=options["yes"], quiet=json_)
    staff = make_staff(course, ctx.meta[SCREEN])
    screen = ctx.meta[SCREEN]
    if options["dry_run"]:
        result = grading_dry_run.try_reference(staff, name, keep=options["keep_server"])
        screen.stop_drawing()
        print_dry_run(result, json_)
        ctx.exit(0 if result.outcome == "graded" else 1)
    only, group = options["only"], options["group"]
    seats = select_seats(course, only, group, name) if only or group else ()
    kept = ("again", "at_once", "accept_failures", "profile")
    grading = grading_run.grade_assignment(
        staff,
        name,
        seats,
        keep=options["keep_server"],
        on_result=(lambda _: None) if json_ else _print_grade,
        **{option: options[option] for option in kept},
    )
    screen.stop_drawing()
    if not json_:
        _print_grading(grading, course.folder)
    released = None
    if options["release"] and grading.is_complete:
        released = release_grades(course.folder, name, seats, by=staff.by, reporter=screen)
    if json_:
        print_json({"assignment": name, "grading": grading, "released": released})
    else:
        _print_release(released, is_wanted=options["release"])
        print_unreleased_changes(name, list_grades(course.folder, name))
        if grading.is_complete and marking.has_unmarked(course.folder, name):
            print_next(f"labctl course mark {name} --next")
    ctx.exit(TEMPORARY if grading.unreached else 0 if grading.is_complete else 1)


def _print_release(released: ReleaseResult | None, *, is_wanted: bool) -> None:
    if released:
        for change in released.changes:
            click.echo(f"changed: {clean(change)}")
        for line in released.unmarked:
            print_message(f"not complete: {clean(line)}")
        click.echo(f"feedback released to: {', '.join(released.students)}")
    elif is_wanted:
        print_message("nothing was released: some submissions are not graded")


def _print_grade(graded: SeatGrade) -> None:
    """Print a line for a submission that was graded now; nothing if it already had a grade."""
    if graded.fresh and graded.record is not None:
        state, color = _state_style(graded.state)
        raw = graded.record.raw
        score = "" if raw is None else f"{raw.score:g}"
        text = f"{graded.seat:<20} {click.style(state, fg=color)} {score}"
        why = graded.why.splitlines()[0] if graded.why else ""
        print_message(f"{text}  {clean(why)}".rstrip())


def _require_plain_dry_run(options: Mapping[str, object]) -> None:
    names = ("only", "group", "again", "release", "accept_failures")
    used = [f"--{name.replace('_', '-')}" for name in names if options[name]]
    if options["dry_run"] and used:
        raise UsageError(
            f"--dry-run cannot be combined with {used[0]}",
            why="a dry run grades your reference solution, and no submission",
            hint=f"labctl course grade {options['name']} --dry-run",
        )


def _print_grading(grading: GradingResult, folder: CourseFolder) -> None:
    names = names_by_seat(folder)
    rows = [
        (graded.seat, names.get(graded.seat, "-"), *_graded_cells(graded))
        for graded in grading.seats
    ]
    headings = ("SEAT", "NAME", "STATE", "POINTS", "CLAIM", "MEASURED", "NOTE")
    print_table(rows, headings, cut=False)
    flagged = [graded for graded in grading.seats if graded.record and graded.record.flags]
    if flagged:
        click.echo("\nPlease review (not proof of misconduct):")
    for graded in flagged:
        for flag in graded.record.flags if graded.record else ():
            evidence = f": {flag.evidence}" if flag.evidence else ""
            click.echo(f"  {graded.seat}  {clean(flag.what)}{clean(evidence)}")
    _print_totals(grading)
    _print_failures(grading, folder.grades)


def _graded_cells(graded: SeatGrade) -> tuple[str, ...]:
    state, record = _state_style(graded.state)[0], graded.record
    why = graded.why.splitlines()[0] if graded.why else ""
    if record is None:
        return state, "-", "-", "-", why
    # Before the penalty: that is a share of all points, also of those that a rubric gives.
    score = "-" if record.raw is None else f"{record.raw.score:g}/{record.points:g}"
    shares = (record.comparison.claimed, record.comparison.measured)
    claimed, measured = ("-" if value is None else f"{value:.4f}" for value in shares)
    kinds = [flag.kind for flag in record.flags]
    late = [f"late, {record.penalty}% off"] if record.penalty else []
    note = ", ".join(dict.fromkeys([*([why] if why else []), *late, *kinds]))
    return state, score, claimed, measured, note


def _print_totals(grading: GradingResult) -> None:
    seats = grading.seats
    counts = {state: sum(1 for graded in seats if graded.state == state) for state in STATES}
    fresh = sum(1 for graded in seats if graded.fresh)
    text = f"{counts['graded']} graded, {counts['failed']} failed, {counts['error']} not graded"
    text += f", {counts['open']} not submitted yet" if counts["open"] else ""
    text += f", {counts['missing']} missing" if counts["missing"] or not counts["open"] else ""
    text += f", {counts['excused']} excused" if counts["excused"] else ""
    click.echo(f"{text}. New: {fresh}.")
    for graded in seats:
        for owner in graded.corrected:
            text = f"{owner}: results.json was edited by hand and is kept"
            print_message(clean(text))
    if counts["error"] and not grading.withheld:
        print_next(f"labctl course grade {grading.assignment}   # retries those")
    if grading.unreached:
        names = ", ".join(grading.unreached)
        print_message(f"the grading server was lost before these were graded: {names}")
        print_message(f"  {clean(grading.why)}")
        print_next(f"labctl course grade {grading.assignment}   # continues")


def _print_failures(grading: GradingResult, grades: Path) -> None:
    """Say where the output of failed programs is, and why grades were withheld."""
    name = grading.assignment
    failed = [graded.seat for graded in grading.seats if graded.state == "failed"]
    if grading.withheld:
        failed = [graded.seat for graded in grading.seats if graded.state == "error"]
        print_message("Every submission failed alike, so none has a grade:")
        print_message(f"  {clean(grading.withheld)}")
    if failed:
        others = (
            f", and {len(failed) - 1} more in the directories beside it" if len(failed) > 1 else ""
        )
        print_message(f"  output: {_find_output(grades / name / failed[0])}{others}")
    if grading.withheld:
        print_next(
            f"labctl course grade {name} --dry-run   # tries your solution\n"
            f"labctl course grade {name} --accept-failures   # instead, to give them 0 points"
        )


def _find_output(directory: Path) -> Path:
    """Return the file with the output of a failed submission: what tests printed, or its own."""
    own, tests = directory / OUTPUT, directory / TESTS_OUTPUT
    is_empty = not own.exists() or own.stat().st_size == 0
    return tests if is_empty and tests.exists() else own

"""The commands course regrades and course statistics: what follows the grades of an assignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_marks import print_mark, read_points
from labctl.cli.course_options import find_acting_person
from labctl.cli.exit_codes import clean, print_next
from labctl.cli.options import json_option
from labctl.cli.tables import age_text, print_json, print_table
from labctl.cli.wrapping import indent_words, print_message
from labctl.courses.records.gradebook import points_text
from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.text import dollars_text

if TYPE_CHECKING:
    from labctl.courses.records.grade_statistics import GradeStatistics
    from labctl.courses.records.regrade_requests import RegradeRequest
    from labctl.courses.regrades import AnsweredRegrade

with lazy_imports(__name__):
    from labctl.courses import regrades, statistics

# characters of the longest bar of a histogram
BAR = 40
# hardest parts that are shown
MOST_PARTS = 5


@click.command("regrades", short_help="List and answer students' regrade requests.")
@click.argument("assignment", default="")
@click.argument("student", default="")
@click.option("--answer", metavar="TEXT", help="Answer the student's open request.")
@click.option("--accept", is_flag=True, help="With --answer: the request is accepted.")
@click.option(
    "--mark",
    "marks",
    nargs=2,
    multiple=True,
    metavar="ITEM POINTS",
    help="With --accept: also give these points for an item of the rubric. Repeatable.",
)
@click.option("--all", "all_", is_flag=True, help="Also list the requests that have an answer.")
@json_option
@click.pass_context
def regrades_command(
    ctx: click.Context,
    assignment: str,
    student: str,
    answer: str | None,
    accept: bool,
    marks: tuple[tuple[str, str], ...],
    all_: bool,
    json_: bool,
) -> None:
    """List the open requests, of ASSIGNMENT and STUDENT or of all, or answer one.

    A student asks with labctl submit --ask-regrade, once the grade is released, and reads the
    answer with labctl submit --grade. --mark gives the student and their team the new points
    together with the answer. The student sees the new grade after the next release.

    \b
    labctl course regrades
    labctl course regrades hw3 alice --answer "Right: 18" --accept --mark code 18
    """
    if (answer is None and (accept or marks)) or (answer is not None and not student):
        raise UsageError(
            "an answer needs an assignment, a student and a text",
            hint='labctl course regrades hw3 alice --answer "..." --accept',
        )
    folder = open_course(ctx, quiet=json_).folder
    if answer is not None:
        by = find_acting_person()
        answered = regrades.answer_regrade(
            folder,
            assignment,
            student,
            answer,
            accepted=accept,
            marks={item: read_points(points) for item, points in marks},
            by=by,
        )
        if json_:
            print_json({"regrade": answered.request, "marks": answered.marks})
        else:
            _print_answer(answered, bool(folder.config.assignments[assignment].rubric))
        return
    listed = regrades.list_regrades(folder, assignment, student)
    shown = [request for request in listed if all_ or student or request.is_open]
    if json_:
        print_json({"regrades": shown})
    elif student and not shown:
        click.echo(f"{student} has not asked for a regrade of {assignment}.")
    else:
        _print_regrades(shown)


def _print_answer(answered: AnsweredRegrade, has_rubric: bool) -> None:
    request = answered.request
    assignment, student = request.assignment, request.student
    word = "accepted" if request.accepted else "declined"
    click.echo(f"{student}: request {request.number} for {assignment} {word}")
    for mark in answered.marks:
        print_mark(mark)
    if not request.accepted:
        return
    release = f"labctl course grades {assignment} --release"
    if answered.marks:
        print_message(f"next: {release}")
        return
    change = (
        f"labctl course mark {assignment} {student} ITEM POINTS --replace"
        if has_rubric
        else f"labctl course grade {assignment} --only {student} --again"
    )
    print_message(f"next: {change}\n      {release}")
    if not has_rubric:
        print_message("To give points by hand, edit its results.json instead of grading again.")


def _print_regrades(requests: list[RegradeRequest]) -> None:
    """Print requests; every line of a student's words is indented, so that it imitates nothing."""
    if not requests:
        click.echo("No regrade request is open.")
    for request in requests:
        head = f"{request.assignment} {request.student}, request {request.number}"
        click.echo(f"{click.style(head, bold=True)}, {age_text(request.at)} ago")
        click.echo(indent_words(clean(request.text), "  | "))
        if not request.is_open:
            word = "accepted" if request.accepted else "declined"
            click.echo(f"  {word} by {clean(request.answered_by)}:")
            click.echo(indent_words(clean(request.answer), "  > "))
    waiting = [request for request in requests if request.is_open]
    if waiting:
        answer = f"labctl course regrades {waiting[0].assignment} {waiting[0].student} --answer"
        print_next(f'{answer} "..." --accept\n{answer} "..."   # declines')


@click.command("statistics", short_help="Show the distribution of an assignment's grades.")
@click.argument("assignment")
@json_option
@click.pass_context
def statistics_command(ctx: click.Context, assignment: str, json_: bool) -> None:
    """Show mean, median and distribution of the grades of ASSIGNMENT, and its hardest parts.

    Hours and dollars are those of servers since the previous due time, per student.

    \b
    labctl course statistics hw3
    labctl course statistics hw3 --json
    """
    found = statistics.read_statistics(open_course(ctx, quiet=json_).folder, assignment)
    if json_:
        print_json({"statistics": found})
    else:
        _print_statistics(found)


def _print_statistics(found: GradeStatistics) -> None:
    excused = f", {found.excused} excused" if found.excused else ""
    points = points_text(found.points)
    click.echo(f"{found.graded} of {found.students} students have a grade{excused}")
    if found.mean is None:
        print_message(f"next: labctl course grade {found.assignment}")
        return
    values = {
        "mean": found.mean,
        "median": found.median,
        "deviation": found.deviation,
        "lowest": found.lowest,
        "highest": found.highest,
    }
    texts = [f"{name} {value:.1f}" for name, value in values.items() if value is not None]
    click.echo(f"{', '.join(texts)}, of {points} points\n")
    most = max(one.students for one in found.bins)
    for one in found.bins:
        bar = "#" * round(one.students / most * BAR)
        span = f"{points_text(one.low)}-{points_text(one.high)}"
        click.echo(f"  {span:>12}  {bar} {one.students or ''}".rstrip())
    if found.parts:
        click.echo("\nhardest parts:")
        rows = [
            (f"  {clean(part.name)}", part.kind, f"{part.share:.0%}", f"{part.mean:.1f}", of)
            for part in found.parts[:MOST_PARTS]
            for of in (points_text(part.points),)
        ]
        print_table(rows, ("  PART", "KIND", "SHARE", "MEAN", "POINTS"))
    if found.hours is not None and found.usd is not None:
        usd = dollars_text(found.usd)
        click.echo(f"\nper student: {found.hours:.1f} h of servers, {usd}")

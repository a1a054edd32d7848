"""course due, grades: when it is due for whom, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.options import json_option

if TYPE_CHECKING:
    from labctl.courses.gradebook import Grade

FORMATS = ("own", "canvas", "moodle", "classroom", "nbgrader", "csv")


@click.command("due", short_help="Move a due time for one student.")
@click.argument("assignment")
@click.argument("student")
@click.argument("time", metavar="TIME")
@click.option("--why", default="", help="Kept in the ledger beside it.")
@json_option
@click.pass_context
def due_command(
    ctx: click.Context, assignment: str, student: str, time: str, why: str, json_: bool
) -> None:
    """Move the due time of ASSIGNMENT for STUDENT (with their team) by TIME; 0 takes it back.

    It counts from the due time in course.yaml: the same again changes nothing.

    \b
    labctl course due hw3 alice +3d --why "ill, with a note"
    """
    from labctl.actions.courses.allowances import due
    from labctl.actions.courses.begin import acting
    from labctl.cli.screen import as_json
    from labctl.cli.submitted import moment

    folder = open_course(ctx, quiet=json_).folder
    found = due(folder, assignment, student, time, by=acting(), why=why)
    if json_:
        as_json({"due": found})
        return
    closes = f"; it closes {moment(found.closes_at, str(found.due))}" if found.closes_at else ""
    click.echo(
        f"{assignment} is due for {student} on {moment(found.due.at, str(found.due))}{closes}"
    )


@click.command("grades", short_help="Grades, written back in the roster's own format.")
@click.argument("assignment")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="Write the file; own: as the roster came.",
)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: stdout."
)
@click.option(
    "--no-penalty", is_flag=True, help="Write scores as graded; lateness is not taken off."
)
@click.option("--release", is_flag=True, help="Let the students read their feedback.")
@json_option
@click.pass_context
def grades_command(
    ctx: click.Context,
    assignment: str,
    format_: str | None,
    out: Path | None,
    no_penalty: bool,
    release: bool,
    json_: bool,
) -> None:
    """Who has which grade for ASSIGNMENT; with --format, the file that the course system imports.

    Only this assignment's column is written, so no other grade is touched.

    \b
    labctl course grades hw3
    labctl course grades hw3 --format canvas -o hw3.csv --release
    """
    from labctl.actions.courses.grades import grades, written
    from labctl.cli.screen import as_json

    course = open_course(ctx, quiet=json_)
    wanted = format_ or ("own" if out else "")
    made = None
    if wanted:
        to = "" if wanted == "own" else wanted
        made = written(course.folder, assignment, to=to, penalty=not no_penalty)
        if out:
            out.write_bytes(made.data)
        elif not json_:
            click.echo(made.data, nl=False)
        for note in made.notes:
            click.echo(note, err=True)
    if release:
        _release(ctx, assignment)
    found = grades(course.folder, assignment)
    if json_:
        rows = [_row_json(one) for one in found]
        written_to = str(out) if out else ""
        as_json({"assignment": assignment, "grades": rows, "written": written_to})
    elif out:
        click.echo(f"{out}: {made.format if made else ''}", err=True)
    elif not wanted:
        _draw(found)


def _release(ctx: click.Context, assignment: str) -> None:
    from labctl.actions.courses.begin import acting
    from labctl.actions.courses.release import release

    folder = open_course(ctx, quiet=True).folder
    found = release(folder, assignment, by=acting())
    waiting = f"; without a grade: {', '.join(found.waiting)}" if found.waiting else ""
    click.echo(f"released to {len(found.students)} students{waiting}", err=True)


def _row_json(one: Grade) -> dict[str, object]:
    return {
        "student": one.student,
        "team": one.team,
        "score": one.score,
        "points": one.points,
        "penalty_percent": one.stamp.penalty,
        "late_s": one.stamp.late_s,
        "final": one.final,
        "submission": one.stamp.number,
        "released": one.released,
        "problem": one.problem,
    }


def _draw(found: list[Grade]) -> None:
    from labctl.cli.screen import span, table
    from labctl.courses.gradebook import points_text

    rows: list[tuple[str, ...]] = [
        (
            one.student,
            one.team or "-",
            points_text(one.score) or "-",
            span(one.stamp.late_s) if one.stamp.late_s else "-",
            f"-{points_text(one.off)}" if one.off else "-",
            points_text(one.final) or "-",
            "yes" if one.released else "-",
            one.problem,
        )
        for one in found
    ]
    headings: tuple[str, ...] = ("STUDENT", "TEAM", "SCORE", "LATE", "OFF", "FINAL", "RELEASED", "")
    if all(not one.team for one in found):
        rows = [(row[0], *row[2:]) for row in rows]
        headings = (headings[0], *headings[2:])
    table(rows, headings)
    scores = [one.final for one in found if one.final is not None]
    mean = (
        f"; mean {sum(scores) / len(scores):.1f} of {points_text(found[0].points)}"
        if scores
        else ""
    )
    click.echo(f"graded: {len(scores)} of {len(found)}{mean}", err=True)

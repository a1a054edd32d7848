"""The command course similarity: code that submissions have in common, for a person to review."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import fit_names_by_seat, make_staff
from labctl.cli.exit_codes import clean
from labctl.cli.options import SCREEN, json_option
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.text import count_text

if TYPE_CHECKING:
    from labctl.courses.records.folder import CourseFolder
    from labctl.courses.similarity import SimilarityResult

with lazy_imports(__name__):
    from labctl.courses import similarity, similarity_page


# lines about files that were left out
MOST_SKIPPED = 10


class PairReport(Value, frozen=True):
    """Two submissions with code in common, as --json prints them; shares are from 0 to 1."""

    seat: str
    share: float
    other: str
    other_share: float
    matched: int


@click.command("similarity", short_help="Compare the code of submissions, for your review.")
@click.argument("name", metavar="ASSIGNMENT")
@click.option(
    "--previous",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Also compare with an earlier year: one directory for each submission, as collect "
    "--into writes them.",
)
@json_option
@click.pass_context
def similarity_command(ctx: click.Context, name: str, previous: Path | None, json_: bool) -> None:
    """Compare the code of the submissions for ASSIGNMENT with each other.

    The result does not prove misconduct: review it before you draw a conclusion. Renamed variables
    and comments do not hide equal code. Code that was handed out does not count, nor code that more
    than five submissions and more than a quarter of them have. The pages stay below .course, and
    students never see them.

    \b
    labctl course similarity hw3
    labctl course similarity hw3 --previous ~/2025/hw3
    """
    course = open_course(ctx, quiet=json_)
    staff = make_staff(course, ctx.meta[SCREEN])
    templates = course.paths.data_dir / "templates"
    result = similarity.find_similar_code(course.folder, name, templates, previous, by=staff.by)
    if json_:
        pairs = [
            PairReport(
                seat=pair.name,
                share=round(pair.share, 4),
                other=pair.other,
                other_share=round(pair.other_share, 4),
                matched=pair.matched,
            )
            for pair in result.pairs
        ]
        body = {"submissions": result.submissions, "previous": result.previous, "pairs": pairs}
        print_json(
            {"assignment": name, **body, "skipped": result.skipped, "page": str(result.page)}
        )
        return
    _print_result(result, course.folder)


def _print_result(result: SimilarityResult, folder: CourseFolder) -> None:
    names = fit_names_by_seat(folder)
    rows = [
        (
            pair.name,
            names.get(pair.name, "-"),
            similarity_page.share_text(pair.share),
            pair.other,
            names.get(pair.other, "-"),
            similarity_page.share_text(pair.other_share),
        )
        for pair in result.pairs
    ]
    compared = count_text(result.submissions, "submission")
    if result.previous:
        compared += f" and {result.previous} of an earlier year"
    if rows:
        click.echo("Please review (not proof of misconduct):")
        print_table(rows, ("SEAT", "NAME", "SHARE", "SEAT", "NAME", "SHARE"))
        print_message("SHARE is the part of a seat's own code that the other submission also has.")
    elif result.submissions + result.previous < 2:
        only = f"Only {compared}" if result.submissions else "Nobody has submitted anything"
        click.echo(f"{only}: nothing to compare.")
    else:
        click.echo(f"No two of {compared} have much code in common.")
    for one in result.skipped[:MOST_SKIPPED]:
        text = f"not compared: {one.document}: {one.path}  ({one.why})"
        print_message(clean(text))
    if len(result.skipped) > MOST_SKIPPED:
        print_message(f"  and {len(result.skipped) - MOST_SKIPPED} more files")
    if rows:
        print_message(f"compared {compared}; side by side, for staff only: {result.page}")

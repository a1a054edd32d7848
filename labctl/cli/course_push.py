"""The command course push: handouts, and the files of assignments."""

from __future__ import annotations

from pathlib import Path

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import make_staff, only_options, select_seats
from labctl.cli.course_servers import print_failures
from labctl.cli.course_table import ClassScreen
from labctl.cli.options import SCREEN, json_option, yes_option
from labctl.cli.screen import print_json
from labctl.cli.starter_output import count_files
from labctl.courses import broadcast, material, starters
from labctl.courses.starters import PublishedStarter
from labctl.errors import NotFoundError


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
    public tests of assignments are published as course.yaml names them: students get them with
    labctl join, and their changes are kept.

    \b
    labctl course push
    labctl course push slides.pdf data/
    """
    course = open_course(ctx, yes=yes, quiet=json_)
    seats = select_seats(course, only, group)
    published = starters.publish_starters(course.folder, course.paths)
    names = material.add_handouts(course.folder, files)
    if not json_:
        _print_published(published)
    with ClassScreen(ctx.meta[SCREEN], [], done="has them") as screen:
        try:
            outcomes = broadcast.push_handouts(make_staff(course, screen), seats)
        except NotFoundError:
            if not published:
                raise
            outcomes = []  # no server is running: publishing was the purpose
    if json_:
        print_json({"files": names, "seats": outcomes, "starters": published})
    elif outcomes:
        complete = sum(not outcome.error for outcome in outcomes)
        click.echo(f"{complete} of {len(outcomes)} servers have all files from handouts/")
        print_failures(outcomes)
    ctx.exit(1 if any(outcome.error for outcome in outcomes) else 0)


def _print_published(published: list[PublishedStarter]) -> None:
    for starter in published:
        count = count_files(starter.files)
        text = f"{count} published" if starter.changed else "published already"
        click.echo(f"{starter.assignment}: {text}; students get them with labctl join")

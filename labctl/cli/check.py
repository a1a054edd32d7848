"""The command check: the public tests of an assignment."""

from __future__ import annotations

from pathlib import Path

import click

from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option, open_lab
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.config import LAB_FILE, find_lab, parse_duration
from labctl.errors import NotFoundError
from labctl.model import NAME_PATTERN
from labctl.runs.public_tests import CheckReport, has_public_tests, run_tests, run_tests_on_server

COLORS = {"passed": "green", "failed": "red", "skipped": "yellow"}


@click.command("check")
@click.argument("assignment", default="")
@click.option(
    "--on-server",
    is_flag=True,
    help="Upload the code, and run the tests in the image of the latest run: no network, no "
    "writable files.",
)
@click.option(
    "--time-limit",
    default="10m",
    metavar="TIME",
    show_default=True,
    help="Stop the tests after this long.",
)
@json_option
@click.pass_context
def check_command(
    ctx: click.Context, assignment: str, on_server: bool, time_limit: str, json_: bool
) -> None:
    """Run the public tests that came with an assignment.

    Without ASSIGNMENT, the tests are those of the lab in this directory. They are the course's
    programs, and run as you on this machine, with this Python (labctl installed with its extra
    `train`). With --on-server, they run in a sandbox on the server. Exits with 1 if a test fails.

    \b
    labctl check
    labctl check hw3
    labctl check --on-server
    """
    try:
        limit_s = parse_duration(time_limit)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--time-limit") from None
    if assignment:
        root = ctx.find_root()
        root.obj = str(_find_assignment_lab(find_lab(Path(root.obj or ".")), assignment))
    lab = open_lab(ctx, quiet=json_)
    if on_server:
        report = run_tests_on_server(lab.context, time_limit_s=limit_s)
    else:
        report = run_tests(lab.config.root, time_limit_s=limit_s)
    if json_:
        print_json({"check": report})
    else:
        _print_report(report)
    ctx.exit(1 if report.failed else 0)


def _find_assignment_lab(lab: Path, assignment: str) -> Path:
    """Return the directory of an assignment, from the course's lab or from that of another one."""
    if NAME_PATTERN.fullmatch(assignment):
        for directory in (lab / assignment, lab.parent / assignment):
            if (directory / LAB_FILE).is_file() and has_public_tests(directory):
                return directory
    raise NotFoundError(
        f"no public tests of {assignment!a} are here",
        why="the assignment has no tests, or you have not fetched it",
        hint="labctl join",
    )


def _print_report(report: CheckReport) -> None:
    for test in report.tests:
        word = click.style(f"{test.outcome:<7}", fg=COLORS[test.outcome])
        click.echo(f"{word}  {clean(test.name)}")
        if test.message:
            click.echo(f"         {clean(test.message)}")
    for path in report.changed:
        text = f"! {path} is not as the course handed it out"
        print_message(clean(text), fg="yellow")
    where = " on the server" if report.where == "server" else ""
    passed = sum(test.outcome == "passed" for test in report.tests)
    click.echo(f"{clean(report.assignment)}: {passed} of {len(report.tests)} tests passed{where}")

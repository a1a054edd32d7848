"""The command course: the instructor's commands, whose modules are imported when called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli import LazyCommands

if TYPE_CHECKING:
    from labctl.course import Course

BEGIN, SERVERS, HAND_IN, MONEY, KEEPER = (
    "Begin",
    "Servers",
    "Collect and grade",
    "Costs",
    "The keeper",
)
# A command without a heading is hidden.
COMMANDS: dict[str, tuple[str, str, str]] = {
    # name: (module, heading, one line for --help); the function is called NAME_command
    "init": ("course_roster", BEGIN, "Create a course's folder from a roster."),
    "roster": ("course_roster", BEGIN, "List the students, or import a new roster."),
    "plan": ("course_plan", BEGIN, "Show planned servers, their highest cost, and quotas."),
    "check": ("course_check", BEGIN, "Class-day check: quota, image, keys, sshd, disk, prices."),
    "bake": ("course_check", BEGIN, "Build a machine image with the course's image and data."),
    "up": ("course_servers", SERVERS, "Start a server per seat, or accounts on shared servers."),
    "status": ("course_inspect", SERVERS, "Show each seat's server, runs, time left and cost."),
    "ssh": ("course_inspect", SERVERS, "Open a shell on a server, or run a command on all."),
    "logs": ("course_inspect", SERVERS, "Print the output of a student's run."),
    "explain": ("course_inspect", SERVERS, "Explain why a student's run is slow or wrong."),
    "push": ("course_servers", SERVERS, "Send files to every server."),
    "message": ("course_servers", SERVERS, "Show a message in every student's terminal."),
    "extend": ("course_servers", SERVERS, "Let a student's server live longer."),
    "down": ("course_servers", SERVERS, "Remove servers; --end-of-term removes all that bills."),
    "due": ("course_grades", HAND_IN, "Move a due time for one student."),
    "collect": ("course_grading", HAND_IN, "Fetch and verify submissions."),
    "grade": ("course_grading", HAND_IN, "Run every submitted model on the hidden test set."),
    "grades": ("course_grades", HAND_IN, "Show grades, or export them in the roster's format."),
    "cost": ("course_costs", MONEY, "Show cost per student, team and assignment; forecast."),
    "budget": ("course_costs", MONEY, "Show or change the budgets of students."),
    "serve": ("course_keeper", KEEPER, "Run the always-on keeper, with the dashboard."),
    "invite": ("course_keeper", KEEPER, "Write a join file for each student."),
    "door": ("course_keeper", "", "Answer the requests of a student's key."),
}


class CourseCommands(LazyCommands):
    table = COMMANDS
    prefix = "course "


@click.group(
    "course",
    cls=CourseCommands,
    epilog="A first course:  labctl course init ml-2026 --roster canvas.csv && cd ml-2026 && "
    "labctl course plan",
)
def course_command() -> None:
    """Manage a course: roster, servers, submissions, grades and costs.

    Every command works on the course's folder: the current directory, or labctl -C DIR course ...
    At the end of the term, labctl course down --end-of-term removes everything that bills.

    \b
    labctl course init ml-2026 --roster canvas.csv
    """


def open_course(ctx: click.Context, *, yes: bool = False, quiet: bool = False) -> Course:
    """Load the course in -C's directory, with events drawn on the screen."""
    from labctl.cli.options import SCREEN
    from labctl.cli.screen import Screen
    from labctl.course import Course

    screen = Screen(yes=yes, quiet=quiet)
    ctx.meta[SCREEN] = screen
    ctx.call_on_close(screen.stop_drawing)
    return Course.load(Path(ctx.find_root().obj or "."), reporter=screen)

"""The command course: the instructor's commands, whose modules are imported when called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from labctl.cli.groups import LazyCommands
from labctl.errors import UsageError, assign_subject
from labctl.errors.subject import COURSE
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    from labctl import course as course_module
    from labctl.cli import options
    from labctl.cli import screen as cli_screen

# characters of a name in the ledger
MAX_PERSON = 64
BEGIN, SERVERS, HAND_IN, MONEY, KEEPER = (
    "Set up",
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
    "check": ("course_check", BEGIN, "Check quotas, image, keys, sshd and disks before a class."),
    "bake": ("course_check", BEGIN, "Build a machine image with the course's image and data."),
    "up": ("course_servers", SERVERS, "Start a server for each seat, or use shared servers."),
    "status": ("course_inspect", SERVERS, "Show each seat's server, run, time left and cost."),
    "ssh": ("course_inspect", SERVERS, "Open a shell on a server, or run a command on all."),
    "logs": ("course_inspect", SERVERS, "Print the output of a student's run."),
    "explain": ("course_inspect", SERVERS, "Explain why a student's run is slow or wrong."),
    "push": ("course_servers", SERVERS, "Send files to students and to every server."),
    "message": ("course_servers", SERVERS, "Show a message in every student's terminal."),
    "extend": ("course_servers", SERVERS, "Extend the lifetime of a student's server."),
    "down": ("course_servers", SERVERS, "Remove servers; --end-of-term removes everything."),
    "due": ("course_grades", HAND_IN, "Move a due time for one student."),
    "collect": ("course_grading", HAND_IN, "Fetch and verify submissions."),
    "similarity": ("course_similarity", HAND_IN, "Compare submissions' code, for your review."),
    "grade": ("course_grading", HAND_IN, "Run every submitted model on the hidden test set."),
    "mark": ("course_marks", HAND_IN, "Give points for the items of a rubric."),
    "comment": ("course_comments", HAND_IN, "Comment on lines of submissions."),
    "excuse": ("course_marks", HAND_IN, "Excuse a student from an assignment."),
    "grades": ("course_grades", HAND_IN, "Show grades, or export them in the roster's format."),
    "regrades": ("course_regrades", HAND_IN, "List and answer students' regrade requests."),
    "statistics": ("course_regrades", HAND_IN, "Show the distribution of grades."),
    "cost": ("course_costs", MONEY, "Show cost per student, team and assignment, and a forecast."),
    "budget": ("course_costs", MONEY, "Show or change the budgets of students."),
    "serve": ("course_keeper", KEEPER, "Run the course's keeper, which is always on."),
    "invite": ("course_keeper", KEEPER, "Write a join file for each student."),
    "door": ("course_keeper", "", "Answer the requests of a student's key."),
}


class CourseCommands(LazyCommands):
    table = COMMANDS
    prefix = "course "

    def invoke(self, ctx: click.Context) -> Any:
        with assign_subject(COURSE):
            return super().invoke(ctx)


@click.group(
    "course",
    cls=CourseCommands,
    epilog="A first course:  labctl course init ml-2026 --roster canvas.csv && cd ml-2026 && "
    "labctl course plan",
)
@click.option(
    "--as",
    "person",
    metavar="NAME",
    default="",
    help="Record this person in the ledger (default: your login), if several share an account.",
)
@click.pass_context
def course_command(ctx: click.Context, person: str) -> None:
    """Manage a course: roster, servers, submissions, grades and costs.

    Run every command in the course's folder, or name the folder: labctl -C DIR course COMMAND. A
    seat is the place of one student or one team: it has one server and one budget. At the end of
    the term, labctl course down --end-of-term removes everything that costs money.

    \b
    labctl course init ml-2026 --roster canvas.csv
    labctl course --as ann extend alice 2h
    """
    if len(person) > MAX_PERSON or not (person or "x").isprintable():
        raise UsageError("--as NAME is not a person's name", hint="labctl course --as ann ...")
    ctx.meta[options.ACTING_PERSON] = person


def open_course(
    ctx: click.Context, *, yes: bool = False, quiet: bool = False
) -> course_module.Course:
    """Load the course in -C's directory, with events drawn on the screen."""
    screen = cli_screen.Screen(yes=yes, quiet=quiet)
    ctx.meta[options.SCREEN] = screen
    ctx.call_on_close(screen.stop_drawing)
    return course_module.Course.load(Path(ctx.find_root().obj or "."), reporter=screen)

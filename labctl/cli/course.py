"""course: the instructor's side. Its subcommands are loaded when they are called."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from labctl.course import Course

BEGIN, SERVERS, HAND_IN, MONEY, KEEPER = (
    "Begin",
    "Servers",
    "Collect and grade",
    "Costs",
    "The keeper",
)
# A command without a heading is not shown; one whose module is not there does not exist.
COMMANDS: dict[str, tuple[str, str, str]] = {
    # name: (module, heading, one line for --help); the function is called NAME_command
    "init": ("course_roster", BEGIN, "Make a course's folder from a roster."),
    "roster": ("course_roster", BEGIN, "Who is in the course; a new roster, shown as a diff."),
    "plan": ("course_plan", BEGIN, "What will be made, what it costs at most, quota and need."),
    "check": ("course_servers", BEGIN, "Class-day check: quota, image, keys, sshd, disk, prices."),
    "bake": ("course_servers", BEGIN, "A machine image with the course's image and data inside."),
    "up": ("course_servers", SERVERS, "A server for each, or accounts on shared ones."),
    "status": ("course_servers", SERVERS, "Every seat's server, runs, clock and dollars."),
    "ssh": ("course_servers", SERVERS, "A shell on one server, or a command on all."),
    "logs": ("course_servers", SERVERS, "What a student's run printed."),
    "explain": ("course_servers", SERVERS, "Why a student's run is slow or wrong."),
    "push": ("course_servers", SERVERS, "Send files to every server."),
    "message": ("course_servers", SERVERS, "A line on every student's terminal."),
    "extend": ("course_servers", SERVERS, "Let a student's server live longer."),
    "down": ("course_servers", SERVERS, "End servers; --end-of-term leaves nothing that bills."),
    "due": ("course_grades", HAND_IN, "Move a due time for one student."),
    "collect": ("course_grading", HAND_IN, "Fetch and verify what was handed in."),
    "grade": ("course_grading", HAND_IN, "Run every submitted model on the hidden set, sealed."),
    "grades": ("course_grades", HAND_IN, "Grades, written back in the roster's own format."),
    "cost": ("course_costs", MONEY, "Dollars per student, team and assignment; the forecast."),
    "budget": ("course_costs", MONEY, "Give a student more, or see what is left."),
    "serve": ("course_keeper", KEEPER, "The always-on keeper, with the dashboard."),
    "invite": ("course_keeper", KEEPER, "A join file for each student."),
    "door": ("course_keeper", "", "What a student's key may ask of the keeper."),
}


class Commands(click.Group):
    """A group whose commands live in modules that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _, _) in COMMANDS.items() if _there(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS or not _there(COMMANDS[cmd_name][0]):
            return None
        module = importlib.import_module(f"labctl.cli.{COMMANDS[cmd_name][0]}")
        found: click.Command | None = getattr(module, f"{cmd_name}_command", None)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = self.list_commands(ctx)
        for heading in dict.fromkeys(heading for _, heading, _ in COMMANDS.values() if heading):
            rows = [
                (name, line)
                for name, (_, own, line) in COMMANDS.items()
                if own == heading and name in known
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in self.list_commands(ctx) and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            said = f" Did you mean {near[0]}?" if near else " See labctl course --help."
            raise click.UsageError(f"There is no command course {name!r}.{said}", ctx)
        return super().resolve_command(ctx, args)


def _there(module: str) -> bool:
    return importlib.util.find_spec(f"labctl.cli.{module}") is not None


@click.group(
    "course",
    cls=Commands,
    epilog="A first course:  labctl course init ml-2026 --roster canvas.csv && cd ml-2026 && "
    "labctl course plan",
)
def course_command() -> None:
    """A roster in, servers out, submissions back, costs per student, an empty account at the end.

    Every command works on the course's folder: the current directory, or labctl -C DIR course ...

    \b
    labctl course init ml-2026 --roster canvas.csv
    """


def open_course(ctx: click.Context, *, yes: bool = False, quiet: bool = False) -> Course:
    """The course in -C's directory, drawn on this screen."""
    from labctl.cli.options import SCREEN
    from labctl.cli.screen import Screen
    from labctl.course import Course

    screen = Screen(yes=yes, quiet=quiet)
    ctx.meta[SCREEN] = screen
    ctx.call_on_close(screen.rest)
    return Course.load(Path(ctx.find_root().obj or "."), reporter=screen)

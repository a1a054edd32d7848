"""The command line: the only place that parses arguments, prints, asks or exits.

Subcommands are loaded when they are called: `labctl --help` imports click and this file alone.
"""

from __future__ import annotations

import gc
import importlib
import sys

import click

from labctl import __version__

STUDENT = "What a student needs"
COMMANDS: dict[str, tuple[str, str, str]] = {
    # name: (module, heading, one line for --help)
    "init": ("setup", STUDENT, "Make a sample project: train an image classifier."),
    "join": ("join", STUDENT, "Join a course with the file or address from its instructor."),
    "up": ("setup", STUDENT, "Get the lab's server ready; again, it is found."),
    "run": ("runs", STUDENT, "Run lab.yaml's command (or yours) in a container on the server."),
    "status": ("status", STUDENT, "Server, runs, clocks and dollars."),
    "forward": ("status", STUDENT, "TensorBoard, Jupyter or any port on localhost."),
    "pull": ("results", STUDENT, "Bring checkpoints and logs home, verified."),
    "down": ("billing", STUDENT, "Bring home what is not here yet, then remove the server."),
    "doctor": ("setup", "Start", "Check this machine, the provider and the server."),
    "push": ("runs", "Work", "Send code and data to the server."),
    "attach": ("runs", "Work", "The tmux session beside a run."),
    "exec": ("runs", "Work", "A command inside a run's container."),
    "ssh": ("runs", "Work", "A shell or a command on the server itself."),
    "cp": ("copy", "Work", "Copy one file to or from the server."),
    "cancel": ("runs", "Work", "End a run; it may write a checkpoint first."),
    "eval": ("results", "Work", "Evaluate the pulled model on this machine."),
    "logs": ("status", "Watch", "What a run printed; -f follows."),
    "top": ("top", "Watch", "The server live: GPUs, processor, memory, disk, runs."),
    "explain": ("explain", "Watch", "Why a run is slow or wrong, and what to try next."),
    "profile": ("explain", "Watch", "A few steps of a run in PyTorch's profiler."),
    "offers": ("billing", "Decide and pay", "What servers there are for the need, with prices."),
    "estimate": ("estimate", "Decide and pay", "What a model needs: memory, hours, dollars."),
    "cost": ("billing", "Decide and pay", "Hours and dollars of servers and runs."),
    "extend": ("billing", "Decide and pay", "Let the server live longer, within its limits."),
    "orphans": ("billing", "Decide and pay", "Everything at the provider that labctl made."),
    "report": ("report", "Hand in and show", "The results presentation: one HTML file."),
    "serve": ("serve", "Hand in and show", "The model behind POST /predict on the server."),
    "submit": ("submit", "Hand in and show", "One verified bundle, handed in."),
    "receive": ("receive", "Teach", "Take in what students hand in, and sign for it."),
    "course": ("course", "Teach", "A roster in, servers out, grades and costs back."),
    "rehearse": ("rehearse", "Teach", "A simulated cloud on this machine: no account, no cost."),
    "config": ("settings", "Rarely", "Every setting, its value and where it came from."),
    "keep": ("keep", "Rarely", "Watch over labs that laptops hand to this machine."),
    "inventory": ("settings", "Rarely", "The server as an Ansible inventory."),
    "secret": ("settings", "Rarely", "Keep values for the secrets that lab.yaml names."),
    "trust": ("settings", "Rarely", "Approve what this lab.yaml may do."),
}


class Commands(click.Group):
    """A group whose commands live in modules that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"labctl.cli.{COMMANDS[cmd_name][0]}")
        found: click.Command = getattr(module, f"{cmd_name}_command")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        headings = dict.fromkeys(heading for _, heading, _ in COMMANDS.values())
        for heading in headings:
            rows = [(name, line) for name, (_, own, line) in COMMANDS.items() if own == heading]
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
            said = f" Did you mean {near[0]}?" if near else " See labctl --help."
            raise click.UsageError(f"There is no command {name!r}.{said}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="A first run:  labctl init digits && cd digits && labctl up && labctl run",
)
@click.option("-C", "directory", default=".", metavar="DIR", help="Work on the lab in DIR.")
@click.version_option(__version__, prog_name="labctl")
@click.pass_context
def cli(ctx: click.Context, directory: str) -> None:
    """A GPU server, your container on it, Jupyter on localhost, results back home."""
    ctx.obj = directory


def main() -> None:
    """The entry point: runs a command and turns whatever happens into an exit code."""
    # What is imported is no garbage: looking for some in it, and once more at the end, costs a
    # short command 20 ms.
    gc.set_threshold(50_000)
    from labctl.cli.exit_codes import run_and_exit

    code = run_and_exit(cli)
    gc.freeze()
    sys.exit(code)

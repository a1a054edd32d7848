"""The commands of `labctl`, and a group that imports a command's module when it is called."""

from __future__ import annotations

import importlib
from typing import Any

import click

from labctl import __version__
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import difflib

    from click import shell_completion

    from labctl import errors
    from labctl.cli import exit_codes
    from labctl.config import installation

EVERYDAY = "Everyday commands"
COMMANDS: dict[str, tuple[str, str, str]] = {
    # name: (module, heading, one line for --help)
    "init": ("setup", EVERYDAY, "Make a lab of the code here, or create a sample project."),
    "join": ("join", EVERYDAY, "Join a course with the file or address from your instructor."),
    "up": ("setup", EVERYDAY, "Start the lab's server, or use the one that it has."),
    "run": ("runs", EVERYDAY, "Run a command in a container on the server."),
    "status": ("status", EVERYDAY, "Show the server, its runs, time limits and cost."),
    "forward": ("forward", EVERYDAY, "Open TensorBoard, Jupyter or any port on localhost."),
    "pull": ("results", EVERYDAY, "Download checkpoints and logs, and verify them."),
    "down": ("billing", EVERYDAY, "Download new results, then remove the server."),
    "doctor": ("doctor", "Start", "Check this machine, the provider and the server."),
    "push": ("push", "Work", "Send code and data to the server."),
    "attach": ("attach", "Work", "Open the tmux session beside a run."),
    "exec": ("attach", "Work", "Run a command inside a run's container."),
    "ssh": ("ssh", "Work", "Open a shell or run a command on the server itself."),
    "cp": ("copy", "Work", "Copy one file to or from the server."),
    "cancel": ("runs", "Work", "Stop a run; it may write a checkpoint first."),
    "sweep": ("sweep", "Work", "Try parameters of a run, and find the best ones."),
    "eval": ("results", "Work", "Evaluate the pulled model on this machine."),
    "quantize": ("quantize", "Work", "Store a model's weights in fewer bits, and compare."),
    "logs": ("logs", "Watch", "Print the output of a run; -f follows it."),
    "top": ("top", "Watch", "Show the server live: GPUs, CPU, memory, disk, runs."),
    "explain": ("explain", "Watch", "Explain why a run is slow or wrong, and what to try next."),
    "profile": ("profile", "Watch", "Record a few steps of a run in PyTorch's profiler."),
    "bandwidth": ("bandwidth", "Watch", "Measure how fast GPUs or servers exchange data."),
    "offers": ("offers", "Plan and pay", "List the servers that fit the need, with prices."),
    "estimate": ("estimate", "Plan and pay", "Estimate the memory, time and cost of a model."),
    "cost": ("billing", "Plan and pay", "Show the time and cost of servers and runs."),
    "move": ("move", "Plan and pay", "Move the lab, and its run, to another server."),
    "stop": ("power", "Plan and pay", "Stop the server and keep its disk; cancels runs."),
    "start": ("power", "Plan and pay", "Start the stopped server again."),
    "extend": ("billing", "Plan and pay", "Extend the server's lifetime, within its limits."),
    "orphans": ("orphans", "Plan and pay", "List everything at the provider that labctl created."),
    "compare": ("compare", "Submit and present", "Compare runs: results, settings, cost, chance."),
    "track": ("track", "Submit and present", "Upload offline logs to Weights & Biases."),
    "report": ("report", "Submit and present", "Write the results as one HTML page."),
    "serve": ("serve", "Submit and present", "Serve the model as POST /predict on localhost."),
    "check": ("check", "Submit and present", "Run an assignment's public tests."),
    "submit": ("submit", "Submit and present", "Submit one verified bundle."),
    "receive": ("receive", "Teach", "Accept submissions and sign a receipt for each."),
    "course": ("course", "Teach", "Manage a course: roster, servers, grades and costs."),
    "rehearse": ("rehearse", "Teach", "Simulate a cloud on this machine: free, no account."),
    "completion": ("completion", "Other", "Make the Tab key complete labctl's command lines."),
    "config": ("settings", "Other", "Show every setting, its value and where it comes from."),
    "docs": ("docs", "Other", "Show a page of the documentation."),
    "images": ("images", "Other", "List or remove the built images that this machine keeps."),
    "keep": ("keep", "Other", "Run a keeper, which watches over labs of other machines."),
    "inventory": ("settings", "Other", "Print the server as an Ansible inventory."),
    "secret": ("settings", "Other", "Store values for the secrets that lab.yaml names."),
    "trust": ("settings", "Other", "Approve what this lab.yaml may do."),
}


class LazyCommands(click.Group):
    """A group of commands; it imports a command's module when the command is called."""

    table = COMMANDS
    # what precedes a command's name in messages
    prefix = ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module = importlib.import_module(f"labctl.cli.{self.table[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = self.table.items()
        for title in dict.fromkeys(heading for _, (_, heading, _) in commands if heading):
            with formatter.section(title):
                formatter.write_dl(
                    [(name, line) for name, (_, heading, line) in commands if heading == title]
                )

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[shell_completion.CompletionItem[str]]:
        """Offer the commands without importing their modules, and the group's options."""
        commands = [
            shell_completion.CompletionItem(name, help=line)
            for name, (_, heading, line) in self.table.items()
            if heading and name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Ctrl-C aborts it, without the blank line that click would print."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            exit_codes.leave_interrupted_line()
            raise click.Abort from interrupt

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in self.list_commands(ctx) and not name.startswith("-"):
            near = next(iter(difflib.get_close_matches(name, self.list_commands(ctx), n=1)), "")
            question = f"; did you mean {near}?" if near else ""
            raise errors.UnknownNameError(
                f"there is no command {self.prefix + name!r}{question}",
                typed=name,
                near=near,
                hint=f"labctl {self.prefix}--help   # lists the commands",
            )
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Print the version; for a clone also its commit, since many commits have one version."""
    if not wanted or ctx.resilient_parsing:
        return
    commit = installation.find_commit()
    click.echo(f"labctl {__version__}{f' (commit {commit})' if commit else ''}")
    ctx.exit()


@click.group(
    cls=LazyCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="A first run:  labctl init digits && cd digits && labctl up && labctl run",
)
@click.option(
    "-C",
    "directory",
    default=".",
    metavar="DIR",
    type=click.Path(),
    help="Use the lab that contains DIR.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version, and in a clone of the repository its commit.",
)
@click.pass_context
def cli(ctx: click.Context, directory: str) -> None:
    """Run your container on a GPU server, open Jupyter on localhost, and download the results."""
    ctx.obj = directory

"""The commands attach and exec: a terminal in a run's session or container."""

from __future__ import annotations

import sys

import click

from labctl.cli.options import open_lab
from labctl.cli.plain_ssh import replace_with_ssh
from labctl.errors import NotFoundError
from labctl.shell import command as words
from labctl.wire.runs import OPEN_SESSION, RunRequest


@click.command("attach")
@click.argument("run", default="")
@click.pass_context
def attach_command(ctx: click.Context, run: str) -> None:
    """Open the tmux session beside RUN (default: the latest run).

    It shows the run's log and the GPU, and has a shell in the container. Leave it with Ctrl-b d.
    Closing it does not affect the run.

    \b
    labctl attach
    """
    from labctl.runs import runs

    lab = open_lab(ctx)
    run_id = runs.find_run(lab.context, run).id
    server = lab.context.get_server()
    request = RunRequest(lab.config.name, lab.id, run_id)
    session = lab.context.open_agent(server).call(OPEN_SESSION, request).session
    replace_with_ssh(
        lab.context, words("exec", "tmux", "attach-session", "-t", f"={session}").render()
    )


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.option("--run", "run_id", default="", help="Use this run's container (default: the latest).")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_command(ctx: click.Context, run_id: str, command: tuple[str, ...]) -> None:
    """Run COMMAND inside the container of a run that is running.

    \b
    labctl exec -- nvidia-smi
    labctl exec -- bash
    """
    from labctl.runs import runs

    lab = open_lab(ctx)
    run = runs.find_run(lab.context, run_id)
    runs.refresh(lab.context, lab.context.get_server())
    run = runs.find_run(lab.context, run.id)
    if run.has_ended:
        raise NotFoundError(
            f"run {run.id} has ended", why=run.summary, hint="labctl run -it -- bash"
        )
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    flags = ("-it",) if tty else ("-i",)
    inner = ("sh", "/lab/run/.labctl/entry.sh", *command)
    line = words("exec", "docker", "exec", *flags, "-e", "LABCTL_ENTER=1", run.container, *inner)
    replace_with_ssh(lab.context, line.render(), tty=tty)

"""The commands stop and start: pause the server, and keep its disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean
from labctl.cli.options import has_blocker, json_option, open_lab, stop_drawing, yes_option
from labctl.cli.setup import print_ready
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.lazy import lazy_imports
from labctl.text import list_text

if TYPE_CHECKING:
    from labctl.lifecycle.stop import StopResult

with lazy_imports(__name__):
    from labctl.cli import run_end
    from labctl.servers import disks


@click.command("stop")
@yes_option
@json_option
@click.pass_context
def stop_command(ctx: click.Context, yes: bool, json_: bool) -> None:
    """Stop the server and keep its disk: you pay only for the disk until `labctl start`.

    Active runs are canceled, after a confirmation. Results, data and images stay on the disk. Where
    the provider cannot stop servers, use `labctl down`.

    \b
    labctl stop
    labctl start
    """
    result = open_lab(ctx, yes=yes, quiet=json_, skips_faults=True).stop()
    if json_:
        print_json(result)
    else:
        _print_stopped(result)


def _print_stopped(result: StopResult) -> None:
    state = "was stopped already" if result.was_stopped else "is stopped"
    click.echo(f"{clean(result.server.alias)} {state}.")
    if result.disk is not None:
        text = disks.describe_stopped_disk(result.disk)
        print_message(f"  {text[0].upper()}{text[1:]}.", err=False)
    if result.closed_forwards:
        names = list_text(result.closed_forwards)
        text = f"  Background forwards are closed: {names}. labctl start shows how to reopen them."
        print_message(text, err=False)
    click.echo("  labctl start      start it again")
    click.echo("  labctl down       download new results, then remove the server and its disk")
    if result.with_checkpoints:
        _print_how_to_continue(result.with_checkpoints[0])


def _print_how_to_continue(run_id: str) -> None:
    pull = f"labctl start && labctl pull {run_id}"
    print_message(f"  {pull}    download the checkpoints of {run_id}", err=False)
    print_message(run_end.describe_data_line(run_id), err=False)


@click.command("start")
@yes_option
@json_option
@click.pass_context
def start_command(ctx: click.Context, yes: bool, json_: bool) -> None:
    """Start the server that `labctl stop` stopped. It never creates a new one.

    \b
    labctl start
    """
    lab = open_lab(ctx, yes=yes, quiet=json_)
    server = lab.start().server
    stop_drawing(ctx)
    if json_:
        print_json({"server": server})
    else:
        print_ready(lab, server, can_run=not has_blocker(ctx))

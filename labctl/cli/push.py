"""The command push."""

from __future__ import annotations

import click

from labctl.cli.options import json_option, open_lab, yes_option
from labctl.cli.tables import print_json
from labctl.text import bytes_text


@click.command("push")
@click.option("--force", is_flag=True, help="Overwrite files that were edited on the server.")
@yes_option
@json_option
@click.pass_context
def push_command(ctx: click.Context, force: bool, yes: bool, json_: bool) -> None:
    """Send code and data to the server. `labctl run` does this automatically.

    \b
    labctl push
    """
    pushes = open_lab(ctx, yes=yes, quiet=json_).push(force=force)
    if json_:
        print_json({"pushed": pushes})
        return
    for push in pushes:
        uploaded = f"{push.sent} uploaded ({bytes_text(push.sent_bytes)})"
        click.echo(f"{push.target}: {uploaded}, {push.unchanged} unchanged")

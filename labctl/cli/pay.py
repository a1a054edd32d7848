"""down."""

from __future__ import annotations

import click

from labctl.cli.options import json_option, open_lab, yes_option


@click.command("down")
@click.option("--discard", is_flag=True, help="Do not save results that are only there.")
@yes_option
@json_option
@click.pass_context
def down_command(ctx: click.Context, discard: bool, yes: bool, json_: bool) -> None:
    """Bring home what is not here yet, remove the server, and say what is left.

    Exit 1 if anything still bills.

    \b
    labctl down
    labctl down --yes
    """
    from labctl.cli.screen import as_json

    lab = open_lab(ctx, yes=yes, quiet=json_)
    ending = lab.down(discard=discard)
    billing = [r for r in ending.leftovers if r.price_usd_per_month > 0]
    if json_:
        as_json(
            {
                "removed": ending.removed,
                "pulled_files": ending.pulled_files,
                "saved_edits": ending.saved_edits,
                "servers_left": ending.servers_left,
                "leftovers": ending.leftovers,
            }
        )
    else:
        if ending.pulled_files or ending.saved_edits:
            edits = f", {ending.saved_edits} edited files in server-edits/"
            click.echo(
                f"brought home: {ending.pulled_files} files in runs/"
                + (edits if ending.saved_edits else "")
            )
        click.echo(
            f"removed {ending.removed}" if ending.removed else f"{lab.config.name} had no server"
        )
        caches = [r for r in ending.leftovers if r.kind == "cache"]
        for left in ending.servers_left:
            click.echo(f"STILL THERE: {left.id} ({left.state})", err=True)
        for one in [r for r in ending.leftovers if r.kind != "cache"]:
            click.echo(f"left: {one.kind} {one.id}, {one.price_usd_per_month:.2f} dollars a month")
        if not ending.servers_left and not billing:
            kept = f" ({len(caches)} image caches stay for the next up)" if caches else ""
            click.echo(f"nothing of it is left that runs or costs anything{kept}")
    ctx.exit(1 if ending.servers_left or billing else 0)

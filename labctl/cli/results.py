"""pull, eval: results at home."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.options import json_option, open_lab

if TYPE_CHECKING:
    from labctl.actions.sync import PulledRun
    from labctl.lab import Lab


@click.command("pull")
@click.argument("run", default="")
@click.option("--all", "everything", is_flag=True, help="New files outside `outputs` too.")
@click.option("--runs", "all_runs", is_flag=True, help="Every run, not only the latest.")
@click.option("--code", is_flag=True, help="Files that were edited on the server, into the lab.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended.")
@json_option
@click.pass_context
def pull_command(
    ctx: click.Context,
    run: str,
    everything: bool,
    all_runs: bool,
    code: bool,
    follow: bool,
    json_: bool,
) -> None:
    """Checkpoints and logs of RUN (the latest) to runs/RUN, whole and verified.

    \b
    labctl pull
    labctl pull --follow
    labctl pull --code
    """
    from labctl.actions import work
    from labctl.cli.exits import clean
    from labctl.cli.screen import as_json

    lab = open_lab(ctx, quiet=json_)
    if code:
        edits = work.pull_code(lab.ground, lab.ground.server())
        if json_:
            as_json({"edits": edits})
        for name in [] if json_ else edits:
            click.echo(clean(name))
        return
    if follow:
        pulled = [_followed(lab, run, json_)]
    else:
        pulled = lab.pull(run, everything=everything, all_runs=all_runs)
    if json_:
        as_json({"pulled": pulled})
        return
    for one in pulled:
        if not follow:
            click.echo(_came(one))
        for left in one.skipped:
            click.echo(f"  not yet: {clean(left.path)}: {clean(left.reason)}", err=True)


def _came(one: PulledRun) -> str:
    from labctl.cli.screen import size

    all_here = "all of it is here" if one.complete else "the run goes on"
    return f"runs/{one.run}: {one.files} files came ({size(one.bytes)}); {all_here}"


def _followed(lab: Lab, run: str, json_: bool) -> PulledRun:
    """Round after round until the run has ended; a line for each that brought something."""
    from labctl.actions import runs
    from labctl.actions.mirror_here import mirror_here

    def told(one: PulledRun) -> None:
        if not json_ and (one.files or one.complete):
            click.echo(_came(one))

    return mirror_here(lab.ground, runs.latest(lab.ground, run).id, on_round=told)


@click.command("eval")
@click.argument("run", default="")
@json_option
@click.pass_context
def eval_command(ctx: click.Context, run: str, json_: bool) -> None:
    """Evaluate the pulled model of RUN (the latest) here, and compare with the server's figure.

    Runs the lab's evaluate.py with this Python; it needs PyTorch: pip install 'labctl[train]'.

    \b
    labctl pull && labctl eval
    """
    from labctl.actions.evaluate import evaluate
    from labctl.cli.screen import as_json

    lab = open_lab(ctx, quiet=json_)
    result = evaluate(lab.ground, run)
    if json_:
        as_json({"evaluation": result})
        return
    click.echo(f"here:          {result.accuracy_local:.4f}  ({result.checkpoint})")
    if result.accuracy_server is None:
        click.echo("on the server: not measured")
        return
    same = "the same" if result.same else "DIFFERENT"
    click.echo(f"on the server: {result.accuracy_server:.4f}  {same}")
    ctx.exit(0 if result.same else 1)

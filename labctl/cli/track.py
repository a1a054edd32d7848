"""The command track: what runs logged for an experiment tracker."""

from __future__ import annotations

import click

from labctl.cli.browser import relative_path
from labctl.cli.completion_values import complete_runs
from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option, make_empty_name_error, open_lab
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.lazy import lazy_imports
from labctl.text import count_text

with lazy_imports(__name__):
    from labctl.runs import tracker_upload


@click.group("track")
def track_command() -> None:
    """Upload what runs logged offline for Weights & Biases.

    \b
    labctl track sync
    """


@track_command.command("sync")
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_runs)
@json_option
@click.pass_context
def _sync(ctx: click.Context, runs: tuple[str, ...], json_: bool) -> None:
    """Upload the offline files of pulled runs.

    wandb's own program uploads those of each RUN (default: every pulled run). They come from runs
    with `track: {wandb: offline}` in lab.yaml; download them with labctl pull first. What was
    uploaded before is left out. The key is the lab's secret WANDB_API_KEY, or the one that `wandb
    login` has stored on this machine.

    \b
    labctl pull --runs && labctl track sync
    labctl track sync 1121-071855-50dd
    """
    if "" in runs:
        raise make_empty_name_error("RUN")
    lab = open_lab(ctx, quiet=json_)
    tracked = tracker_upload.upload_runs(lab.context, runs)
    if json_:
        print_json({"runs": tracked})
        return
    for one in tracked:
        what = count_text(one.uploaded, "part") + " uploaded" if one.uploaded else "up to date"
        place = relative_path(lab.config.root / "runs" / one.run)
        click.echo(f"{clean(place)}: {what}")
    if not tracked:
        print_message("No offline files of Weights & Biases in runs/: labctl pull --runs")

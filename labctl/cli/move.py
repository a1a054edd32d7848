"""The command move: the lab, its results and its run go to another server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option, need_options, open_lab, stop_drawing, yes_option
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.errors import LabError, UsageError
from labctl.lazy import lazy_imports
from labctl.shell import command
from labctl.text import price_or_free_text

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.lifecycle.move import MoveResult
    from labctl.lifecycle.move_end import CanceledMove

with lazy_imports(__name__):
    from labctl.servers import gpus

# What a typed machine type or GPU leaves open, whatever lab.yaml says of the other one.
OPEN = {"type": ("gpu", "auto"), "gpu": ("type", "any")}


@click.command("move")
@need_options
@click.option(
    "--cancel",
    is_flag=True,
    help="Give up an unfinished move: remove its new server, and stay on the old one.",
)
@yes_option
@json_option
@click.pass_context
def move_command(
    ctx: click.Context,
    /,
    provider: str | None,
    cancel: bool,
    yes: bool,
    json_: bool,
    **overrides: str | None,
) -> None:
    """Move the lab to another server, with its results, code, data and active run.

    The new server is started and checked first. Then the run is stopped with a checkpoint, and the
    same run resumes there. The old server is removed at the end. If a step fails, the lab stays on
    the old server. Repeat the command without options to continue after an interruption.

    \b
    labctl move --gpu A100
    labctl move --provider aws
    labctl move --cancel
    """
    typed = {key: value for key, value in overrides.items() if value is not None}
    if cancel and (typed or provider):
        raise UsageError(
            "--cancel cannot be combined with other options", hint="labctl move --cancel"
        )
    lab = open_lab(ctx, yes=yes, quiet=json_, overrides=_complete(typed))
    if cancel:
        _show_canceled(lab, lab.cancel_move(), json_=json_)
        return
    need = lab.config.server.need if typed else None
    result = lab.move(need, provider=provider or "")
    stop_drawing(ctx)
    if json_:
        print_json(result)
        return
    _print_moved(lab, result)
    if typed:
        _warn_of_file(open_lab(ctx, yes=yes), result)


def _complete(typed: dict[str, str]) -> dict[str, str]:
    """Return the typed options, and what they leave open although lab.yaml may name it."""
    opened = dict(OPEN[key] for key in typed if key in OPEN)
    return {**opened, **typed}


def _print_moved(lab: Lab, result: MoveResult) -> None:
    server, former = result.server, result.former
    price = price_or_free_text(server.offer.price_usd_per_hour)
    where = f"{server.provider} {server.offer.type}"
    click.echo(clean(f"{lab.config.name} is on {where} now ({price})."))
    print_message(clean(f"  {former.id} ({former.provider}) was removed."), err=False)
    files = result.saved.results + result.saved.edits + result.saved.home_files
    if files:
        click.echo(f"  {files} new files were downloaded first.")
    rows = [(f"labctl logs -f {run_id}", "follow the run") for run_id in result.resumed]
    if result.closed_forwards:
        line = command("labctl", "forward", *result.closed_forwards, "--detach").render()
        rows.append((line, "open the forwards again"))
    rows += [(f"ssh {server.alias}", "open a shell on the server"), ("labctl down", "remove it")]
    width = max(len(line) for line, _ in rows)
    for line, text in rows:
        click.echo(f"  {line:<{width}}  {text}")


def _warn_of_file(lab: Lab, result: MoveResult) -> None:
    """Warn if lab.yaml asks for another GPU than the new server has: the next run would fail."""
    try:
        gpus.choose_server_gpus_option(lab.context, result.server)
    except LabError as error:
        text = f"lab.yaml does not fit this server: {error.what}; change `gpu:` before the next run"
        print_message(clean(text), fg="yellow")


def _show_canceled(lab: Lab, result: CanceledMove, *, json_: bool) -> None:
    if json_:
        print_json(result)
        return
    removed = f"{result.removed} was removed" if result.removed else "no new server existed"
    print_message(clean(f"{removed}; {lab.config.name} stays on its old server."), err=False)
    for run_id in result.returned:
        click.echo(clean(f"  labctl logs -f {run_id}    follow the run"))

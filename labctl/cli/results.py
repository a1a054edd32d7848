"""pull, eval: results at home."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.options import json_option, open_lab

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.runs.evaluate import Evaluated
    from labctl.sync.pull import PulledRun


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
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import as_json
    from labctl.sync.lab_files import pull_code

    lab = open_lab(ctx, quiet=json_)
    if code:
        edits = pull_code(lab.ground, lab.ground.server())
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
    from labctl.runs import runs
    from labctl.runs.outputs import mirror_here

    def told(one: PulledRun) -> None:
        if not json_ and (one.files or one.complete):
            click.echo(_came(one))

    return mirror_here(lab.ground, runs.latest(lab.ground, run).id, on_round=told)


@click.command("eval")
@click.argument("checkpoint", default="")
@click.option("--on-server", is_flag=True, help="There, shut in: no network, nothing writable.")
@click.option(
    "--time-limit", default="1h", metavar="TIME", help="With --on-server.", show_default=True
)
@json_option
@click.pass_context
def eval_command(
    ctx: click.Context, checkpoint: str, on_server: bool, time_limit: str, json_: bool
) -> None:
    """Evaluate a run's best checkpoint, or CHECKPOINT, and compare here with the server.

    CHECKPOINT is a run (the latest), a checkpoint's name or its path below runs/. Runs the lab's
    evaluate.py: here on what was pulled, with this Python (pip install 'labctl[train]'), or with
    --on-server in the run's own image and code. Pickles are not loaded here. What comes of it is
    kept in runs/RUN/evaluation.json, for labctl report. Ends with 1 where the two differ.

    \b
    labctl pull && labctl eval
    labctl eval runs/1121-070314-8f3a/checkpoints/step-00000320
    labctl eval --on-server
    """
    from labctl.cli.screen import as_json
    from labctl.runs.evaluate import evaluate, evaluate_there

    limit_s = _limit_s(time_limit)
    lab = open_lab(ctx, quiet=json_)
    if on_server:
        result = evaluate_there(lab.ground, checkpoint, time_limit_s=limit_s)
    else:
        result = evaluate(lab.ground, checkpoint)
    if json_:
        as_json({"evaluation": result})
    else:
        _show(result)
    ctx.exit(1 if _both(result) and not result.same else 0)


def _both(result: Evaluated) -> bool:
    return None not in (result.accuracy_local, result.accuracy_server)


def _limit_s(text: str) -> int:
    from labctl.config.scalars import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--time-limit") from None


def _show(result: Evaluated) -> None:
    from labctl.cli.exit_codes import clean
    from labctl.runs.evaluation import interval

    found = result.evaluation
    for name, accuracy in (
        ("here:", result.accuracy_local),
        ("on the server:", result.accuracy_server),
    ):
        figure = "not measured" if accuracy is None else f"{accuracy:.4f}"
        said = "the same" if result.same else "DIFFERENT" if _both(result) else ""
        told = f"({result.checkpoint})" if name == "here:" else said
        click.echo(f"{name:<15}{figure}  {clean(told)}".rstrip())
    if found is None:
        return
    low, high = interval(found.correct, found.items) or (0.0, 1.0)
    right = f"{found.correct} of {found.items} on {found.split}"
    click.echo(f"{'right:':<15}{clean(right)}; 95 % interval {low:.4f} to {high:.4f}")
    if found.baseline_accuracy is not None:
        said = f"{found.baseline_accuracy:.4f}, by always saying the most frequent class"
        click.echo(f"{'baseline:':<15}{said}")
    click.echo("labctl report    curves, classes and the worst mistakes on one page")

"""The command sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from labctl import __version__
from labctl.cli.browser import open_in_browser, relative_path
from labctl.cli.exit_codes import (
    INTERRUPTED,
    clean,
    leave_interrupted_line,
    read_typed_command,
)
from labctl.cli.number_range import NumberRange
from labctl.cli.options import json_option, open_lab, stop_drawing, yes_option
from labctl.cli.own_command import EXAMPLE, OwnCommand, require_program
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.config.scalars import parse_price
from labctl.config.sweep import MOST_PARALLEL, MOST_TRIALS
from labctl.errors import LabError, UsageError
from labctl.lazy import lazy_imports
from labctl.lifecycle.sweeps.plan import DEFAULT_STUDY, SweepOptions, describe_params
from labctl.state.uses import hold_use
from labctl.text import dollars_text, duration_text, price_or_free_text

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.lifecycle.sweeps.sweep import SweepResult
    from labctl.lifecycle.sweeps.trials import Trial

with lazy_imports(__name__):
    from labctl import config
    from labctl.lifecycle.sweeps import sweep
    from labctl.servers import gang


class _SweepCommand(OwnCommand):
    """`labctl sweep`, whose command is `run` in lab.yaml if none is typed."""

    def find_default(self, ctx: click.Context) -> tuple[str, ...]:
        try:
            return config.load_lab(Path(ctx.find_root().obj or ".")).run or EXAMPLE
        except LabError:
            return EXAMPLE


@click.command("sweep", cls=_SweepCommand)
@click.option(
    "--param",
    "parameters",
    multiple=True,
    metavar="NAME=VALUES",
    help="Try these values of the command's option --NAME: a range such as 1e-4..1e-1:log or 1..8, "
    "or choices such as 32,64. Adds to sweep.parameters in lab.yaml, or overrides one. Repeatable.",
)
@click.option("--metric", default="", help="Number or curve that the runs report, to optimize.")
@click.option(
    "--direction",
    type=click.Choice(["minimize", "maximize"]),
    help="Whether a small or a large metric is good.",
)
@click.option(
    "--trials",
    type=NumberRange(20, 1, MOST_TRIALS),
    metavar="N",
    help="Number of trials of the study, with those of earlier calls.  [default: 20]",
)
@click.option(
    "--parallel",
    type=NumberRange(4, 1, MOST_PARALLEL),
    metavar="N",
    help="Run N trials at a time, on the lab's servers and side by side.  [default: one a server]",
)
@click.option(
    "--budget", metavar="DOLLARS", help="Start no new trial that could exceed this in total."
)
@click.option(
    "--seed",
    type=NumberRange(7, 0, 2**32 - 1),
    metavar="N",
    help="Seed of the sampler.  [default: 0]",
)
@click.option(
    "--study",
    default=DEFAULT_STUDY,
    show_default=True,
    help="Name of the study. Its runs are called STUDY-0, STUDY-1 and so on. --show without it "
    "shows the study that changed last.",
)
@click.option("--up", is_flag=True, help="Start servers that are missing, and replace lost ones.")
@click.option("--show", is_flag=True, help="Show the trials so far, and start nothing.")
@click.option("--open", "open_", is_flag=True, help="Open the results in the browser.")
@yes_option
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
@click.pass_context
def sweep_command(
    ctx: click.Context,
    /,
    up: bool,
    show: bool,
    open_: bool,
    yes: bool,
    json_: bool,
    **values: Any,
) -> None:
    """Try parameters of COMMAND (default: `run` in lab.yaml) and find the best ones.

    Each trial is a run with other values of its options, which Optuna chooses by the results so
    far. Ctrl-C stops starting trials; those that run continue. The same command continues the
    sweep: it repeats no trial and loses none.

    \b
    labctl sweep --trials 20 --parallel 4 --budget 3
    labctl sweep --param lr=1e-4..1e-1:log --param batch=32,64
    labctl sweep --show
    labctl run --from-trial 7
    """
    options = _make_options(**values)
    require_program("labctl sweep", options.command, lambda: EXAMPLE)
    lab = open_lab(ctx, yes=yes, quiet=json_)
    if show:
        is_named = ctx.get_parameter_source("study") is not ParameterSource.DEFAULT
        study = options.study if is_named else sweep.find_newest_study(lab.context)
        result = sweep.show_sweep(lab.context, study, version=__version__)
    else:
        result = _run(ctx, lab, options, starts=up)
    stop_drawing(ctx)
    if open_:
        open_in_browser(Path(result.page).as_uri())
    if json_:
        print_json({"sweep": result})
        return
    print_result(result, sweep.list_studies(lab.context))


def _make_options(budget: str | None, **values: Any) -> SweepOptions:
    try:
        budget_usd = None if budget is None else parse_price(budget)
    except ValueError as error:
        raise UsageError(f"--budget: {error}", hint="labctl sweep --budget 3") from None
    return SweepOptions(budget_usd=budget_usd, **values)


def _run(ctx: click.Context, lab: Lab, options: SweepOptions, *, starts: bool) -> SweepResult:
    """Run the sweep. Ctrl-C ends labctl, not the runs."""
    try:
        with hold_use(lab.context.state, lab.id, "run"):
            return lab.sweep(options, starts=starts)
    except KeyboardInterrupt:
        stop_drawing(ctx)
        leave_interrupted_line()
        _print_still_running(lab, options.study)
        ctx.exit(INTERRUPTED)
    except LabError:
        stop_drawing(ctx)
        _print_still_running(lab, options.study)
        raise


def _print_still_running(lab: Lab, study: str) -> None:
    """Say which trials go on without labctl, and what that costs."""
    try:
        trials = sweep.read_study(lab.context, study).trials
    except LabError:
        return
    # With a reason, its run has ended, and the trial waits for the user.
    running = [
        trial.run for trial in trials if trial.state == "running" and trial.run and not trial.why
    ]
    if not running:
        return
    cost = price_or_free_text(gang.sum_prices(lab.context))
    verb = "is" if len(running) == 1 else "are"
    print_message(f"{', '.join(running)} {verb} still running ({cost})")
    call = clean(read_typed_command())
    for line, effect in ((call, "continue the sweep"), ("labctl down", "stop everything")):
        print_message(f"  {line:<{len(call) + 3}}{effect}")


def print_result(result: SweepResult, studies: Sequence[str]) -> None:
    """Print the trials, best first, the parameters' importance, and the next command.

    `studies` are the names of all studies of the lab.
    """
    headings = ("TRIAL", "VALUE", "STATE", "TIME", "RUN", "PARAMETERS")
    rows = [_make_row(trial) for trial in result.trials]
    print_table(rows, headings, cut=False, optional=("TIME", "RUN"))
    click.echo()
    if result.stopped:
        print_message(f"Stopped: {result.stopped}.", err=False)
    shares = sorted(result.importances.shares.items(), key=lambda item: -item[1])
    if shares:
        text = ", ".join(f"{clean(name)} {share:.0%}" for name, share in shares)
        print_message(f"Importance ({result.importances.evaluator}): {text}", err=False)
    cost = "free" if result.cost.is_free else dollars_text(result.cost.spent_usd)
    done = f"{len(result.trials)} of {result.wanted} trials"
    print_message(f"{done} ({cost}); results: {clean(relative_path(Path(result.page)))}", err=False)
    if result.best is not None:
        # Without a study's name, --from-trial means the one that changed last.
        is_clear = result.study == DEFAULT_STUDY and len(studies) == 1
        name = "" if is_clear else f"{result.study}:"
        call = f"labctl run --from-trial {name}{result.best}"
        print_message(f"{call}    run the best trial again")
    if others := [name for name in studies if name != result.study]:
        call = f"labctl sweep --show --study {others[0]}"
        print_message(f"{call}    show another study of this lab")


def _make_row(trial: Trial) -> tuple[str, ...]:
    value = "-" if trial.value is None else f"{trial.value:.5g}"
    took = duration_text(trial.seconds) if trial.seconds else "-"
    parameters = describe_params(trial.params)
    if trial.why:
        parameters = f"{parameters}  ({trial.why})"
    return str(trial.number), value, trial.state_text, took, trial.run or "-", parameters

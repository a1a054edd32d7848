"""The commands pull and eval: results on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from labctl import shell
from labctl.cli.browser import relative_path
from labctl.cli.completion_values import complete_runs
from labctl.cli.exit_codes import clean
from labctl.cli.options import RUN, SCREEN, json_option, open_lab, require_name
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.config.scalars import parse_duration
from labctl.errors import NotFoundError, UsageError
from labctl.lazy import lazy_imports
from labctl.runs.evaluation import confidence_interval
from labctl.text import bytes_text, count_text, names_text

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.runs.evaluate import EvaluationResult
    from labctl.sync.pull import PulledRun

with lazy_imports(__name__):
    from labctl.courses import saved_results
    from labctl.lifecycle import reconcile
    from labctl.runs import evaluate, missing_model, runs
    from labctl.runs import outputs as run_outputs
    from labctl.sync import lab_files


MOST_NAMED = 5


@click.command("pull")
@RUN
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Of each run, also download new files that are not in lab.yaml's `outputs`.",
)
@click.option("--runs", "all_runs", is_flag=True, help="Download every run, not only the latest.")
@click.option(
    "--code", is_flag=True, help="Download code that was edited on the server, instead of results."
)
@click.option(
    "--from-course",
    is_flag=True,
    help="Download what the course saved when it ended your server, to from-course/.",
)
@click.option("--follow", "-f", is_flag=True, help="Keep downloading until the run has ended.")
@json_option
@click.pass_context
def pull_command(
    ctx: click.Context,
    run: str,
    everything: bool,
    all_runs: bool,
    code: bool,
    from_course: bool,
    follow: bool,
    json_: bool,
) -> None:
    """Download the outputs of RUN (default: the latest run), such as checkpoints, to runs/RUN.

    Every file is complete and verified.

    \b
    labctl pull
    labctl pull --follow
    labctl pull --code
    """
    _require_effect(run, everything=everything, all_runs=all_runs, code=code, follow=follow)
    if from_course and (run or everything or all_runs or code or follow):
        raise UsageError(
            "--from-course stands alone",
            why="it downloads everything that the course has saved",
            hint="labctl pull --from-course",
        )
    lab = open_lab(ctx, quiet=json_)
    if from_course:
        _pull_from_course(lab, ctx, json_)
        return
    if code:
        _pull_code(lab, json_)
        return
    if follow:
        pulled_runs = [_follow_outputs(lab, run, json_)]
    else:
        pulled_runs = lab.pull(run, everything=everything, all_runs=all_runs)
    if json_:
        print_json({"pulled": pulled_runs})
        return
    for pulled in pulled_runs:
        if not follow:
            click.echo(_describe_pull(lab, pulled))
        _print_missing(lab, pulled)


def _pull_code(lab: Lab, json_: bool) -> None:
    """Download the code that was edited on the server."""
    edits = lab_files.pull_code(lab.context, lab.context.get_server())
    if json_:
        print_json({"edits": edits})
    for name in [] if json_ else edits:
        click.echo(f"downloaded {clean(name)}")


def _print_missing(lab: Lab, pulled: PulledRun) -> None:
    """Print what a pull left out, and how to get it."""
    print_left_files(lab, pulled)
    for missing in pulled.skipped:
        print_message(f"  skipped: {clean(missing.path)}: {clean(missing.reason)}")
    if pulled.skipped:
        _print_how_to_continue(lab, pulled.run)


def _pull_from_course(lab: Lab, ctx: click.Context, json_: bool) -> None:
    """Download the results that the course's keeper saved."""
    result = saved_results.fetch_saved_results(lab.context)
    if not json_:
        ctx.meta[SCREEN].stop_drawing()
    if json_:
        files = {"downloaded": result.downloaded, "present": result.present}
        print_json({"directory": str(result.directory), **files, "skipped": result.skipped})
        return
    count = count_text(len(result.downloaded), "file")
    size = f" ({bytes_text(result.size_bytes)})" if result.downloaded else ""
    present = f", {len(result.present)} there already" if result.present else ""
    place = clean(relative_path(lab.config.root / saved_results.DIRECTORY))
    click.echo(f"{place}/: downloaded {count}{size}{present}")
    for path in result.skipped:
        click.echo(f"  skipped: {clean(path)}", err=True)


def _print_how_to_continue(lab: Lab, run_id: str) -> None:
    """Print how to get the files that an unfinished run is still writing."""
    run = lab.context.state.get_run(lab.id, run_id)
    if run is not None and not run.has_ended:
        line = shell.command("labctl", "pull", "--follow", run_id).render()
        text = f"run {run_id} has not ended; to download each file once it is complete"
        print_message(f"  {text}: {line}")


def _require_effect(
    run: str, *, everything: bool, all_runs: bool, code: bool, follow: bool
) -> None:
    """UsageError if a word or an option would have no effect beside the others."""
    wider = [name for name, is_set in (("--all", everything), ("--runs", all_runs)) if is_set]
    if code and (ignored := [*["RUN"] * bool(run), *["--follow"] * follow, *wider]):
        raise UsageError(
            f"--code cannot be combined with {' and '.join(ignored)}",
            why="it copies edited code and downloads no results",
            hint="labctl pull --code",
        )
    if follow and wider:
        name = [run] if run else []
        first = shell.command("labctl", "pull", "--follow", *name)
        then = shell.command("labctl", "pull", *wider, *([] if all_runs else name))
        raise UsageError(
            f"--follow cannot be combined with {' and '.join(wider)}",
            why="it downloads the outputs of one run",
            hint=first.chain(then).render(),
        )
    if all_runs and run:
        raise UsageError(
            "--runs cannot be combined with RUN",
            why="it downloads every run",
            hint=shell.command("labctl", "pull", *wider).render(),
        )


def print_left_files(lab: Lab, pulled: PulledRun) -> None:
    """Name the files that a pull of the outputs leaves on the server, and how to get them."""
    if not pulled.left:
        return
    left = sorted(pulled.left, key=lambda file: (-file.size, file.path))
    names = [f"{clean(file.path)} ({bytes_text(file.size)})" for file in left]
    verb = "was" if len(names) == 1 else "were"
    text = f"{names_text(names, MOST_NAMED)} {verb} written outside outputs"
    print_message(f"  left on the server: {text}: labctl pull --all {pulled.run}")
    print_outputs_line(lab, [file.path for file in left])


def print_outputs_line(lab: Lab, files: Sequence[str]) -> None:
    """Print the line of lab.yaml with which later runs' pulls include these files."""
    outputs = run_outputs.extend_outputs(lab.config.outputs, files)
    if outputs != lab.config.outputs:
        line = f"outputs: [{', '.join(outputs)}]"
        print_message(f"  to download such files of later runs too, in lab.yaml: {line}")


def _describe_pull(lab: Lab, pulled: PulledRun) -> str:
    """Say what was downloaded, and where, as a path that can be typed in this directory."""
    files = f"{pulled.files} {'file' if pulled.files == 1 else 'files'}"
    rest = "everything is up to date." if pulled.complete else "more may follow."
    if pulled.complete and pulled.left:
        rest = "its outputs are up to date."
    news = f"Downloaded {files} ({bytes_text(pulled.bytes)})" if pulled.files else "Nothing new"
    place = relative_path(lab.config.root / "runs" / pulled.run)
    return f"{clean(place)}: {news}; {rest}"


def _follow_outputs(lab: Lab, run: str, json_: bool) -> PulledRun:
    """Pull until the run has ended; print a line for each round that downloaded something."""

    def print_round(pulled: PulledRun) -> None:
        if not json_ and (pulled.files or pulled.complete):
            click.echo(_describe_pull(lab, pulled))

    run_id = runs.find_run(lab.context, run).id
    try:
        return run_outputs.follow_outputs(lab.context, run_id, on_round=print_round)
    except NotFoundError as error:
        for pulled in reconcile.find_downloaded(lab.context, [run_id]):
            print_round(pulled)
            return pulled
        raise reconcile.explain_missing_results(lab.context, [run_id], error) from None


def _print_example(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    """Print the example and exit: outside of a lab too."""
    if is_given:
        click.echo(missing_model.EXAMPLE, nl=False)
        ctx.exit()


@click.command("eval")
@click.argument("checkpoint", default="", callback=require_name, shell_complete=complete_runs)
@click.option(
    "--on-server",
    is_flag=True,
    help="In a sandbox on the server: no network, no writable files.",
)
@click.option(
    "--time-limit",
    default="1h",
    metavar="TIME",
    show_default=True,
    help="With --on-server: stop the evaluation after this long.",
)
@click.option(
    "--example",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_example,
    help="Print an evaluate.py to start from.",
)
@json_option
@click.pass_context
def eval_command(
    ctx: click.Context, checkpoint: str, on_server: bool, time_limit: str, json_: bool
) -> None:
    """Evaluate a run's best checkpoint, or CHECKPOINT, and compare it with the server's result.

    CHECKPOINT is a run (default: the latest), the name of a checkpoint, or its path below runs/.
    labctl runs the lab's evaluate.py on the pulled files with this Python (labctl installed with
    its extra `train`), or with --on-server in the run's own image and code. It does not load
    pickles on this machine. The result is kept in runs/RUN/evaluation.json for labctl report. Exits
    with 1 if the two results differ.

    \b
    labctl pull && labctl eval
    labctl eval runs/1121-070314-8f3a/checkpoints/step-00000320
    labctl eval --on-server
    """
    limit_s = _parse_time_limit_s(time_limit)
    lab = open_lab(ctx, quiet=json_)
    if on_server:
        result = evaluate.evaluate_on_server(lab.context, checkpoint, time_limit_s=limit_s)
    else:
        result = evaluate.evaluate(lab.context, checkpoint)
    if json_:
        print_json({"evaluation": result})
    else:
        _print_evaluation(result, report=f"labctl report {result.run if checkpoint else ''}")
    ctx.exit(1 if _has_both(result) and not result.same else 0)


def _has_both(result: EvaluationResult) -> bool:
    return None not in (result.accuracy_local, result.accuracy_server)


def _parse_time_limit_s(text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--time-limit") from None


def _print_evaluation(result: EvaluationResult, report: str) -> None:
    """Print a result, and the command `report` that shows its page."""
    comparison = "the same" if result.same else "DIFFERENT" if _has_both(result) else ""
    for name, accuracy, remark in (
        ("here:", result.accuracy_local, f"({result.checkpoint})" if result.checkpoint else ""),
        ("on the server:", result.accuracy_server, comparison),
    ):
        figure = "not measured" if accuracy is None else f"{accuracy:.4f}"
        click.echo(f"{name:<15}{figure}  {clean(remark)}".rstrip())
    evaluation = result.evaluation
    if evaluation is None:
        return
    low, high = confidence_interval(evaluation.correct, evaluation.items) or (0.0, 1.0)
    score = f"{evaluation.correct} of {evaluation.items} on {evaluation.split}"
    click.echo(f"{'correct:':<15}{clean(score)}; 95% interval {low:.4f} to {high:.4f}")
    if evaluation.baseline_accuracy is not None:
        baseline = f"{evaluation.baseline_accuracy:.4f}, always predicting the majority class"
        click.echo(f"{'baseline:':<15}{baseline}")
    click.echo(f"{report.strip()}    curves, classes and the worst mistakes on one page")

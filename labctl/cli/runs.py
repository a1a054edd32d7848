"""The commands run and cancel."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.completion_values import complete_files, complete_runs
from labctl.cli.exit_codes import (
    INTERRUPTED,
    OWN_FAILURE,
    clean,
    leave_interrupted_line,
    read_typed_command,
)
from labctl.cli.from_trial import FROM_TRIAL, choose_command
from labctl.cli.log_silence import LogSilenceLine, describe_activity
from labctl.cli.number_range import NumberRange
from labctl.cli.options import (
    RUN,
    SCREEN,
    TIMINGS,
    find_timeline,
    json_option,
    list_timings,
    open_lab,
    print_timings_of_failure,
    stop_drawing,
    yes_option,
)
from labctl.cli.own_command import EXAMPLE, OwnCommand
from labctl.cli.probe import confirm_after_probe
from labctl.cli.run_options import RunOptions, require_compatible
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message, wrap_lines
from labctl.errors import InterruptError, LabError, NameTakenError
from labctl.events import Step
from labctl.lazy import lazy_imports
from labctl.state.uses import hold_use
from labctl.text import names_text, price_or_free_text

if TYPE_CHECKING:
    from labctl.cli.screen import Screen
    from labctl.lab import Lab
    from labctl.model import Run

with lazy_imports(__name__):
    from labctl import config
    from labctl.cli import name_options, results, run_end, run_server, run_terminal
    from labctl.lifecycle import cancel, recovery_lock
    from labctl.servers import adoption, gang

# the wait until a run has begun, as far as no step names a part of it
STARTING = "starting the run"


class _RunCommand(OwnCommand):
    """`labctl run`, whose command is `run` in lab.yaml if none is typed."""

    def find_default(self, ctx: click.Context) -> tuple[str, ...]:
        try:
            return config.load_lab(Path(ctx.find_root().obj or ".")).run or EXAMPLE
        except LabError:
            return EXAMPLE


@click.command("run", cls=_RunCommand)
@click.option("--detach", "-d", is_flag=True, help="Start the run without following its log.")
@click.option(
    "--id",
    "run_id",
    default="",
    shell_complete=complete_runs,
    help="Name of the run. If it exists already, labctl follows it and starts no second one.",
)
@click.option("-it", "tty", is_flag=True, help="Attach a terminal, for interactive programs.")
@click.option("--no-push", is_flag=True, help="Run the code that is already on the server.")
@click.option("--up", is_flag=True, help="Start a server first if the lab has none.")
@click.option(
    "--down", is_flag=True, help="After the run, download the results and remove the server."
)
@click.option("--recover", is_flag=True, help="Resume the run on a new server if its server dies.")
@click.option(
    "--keeper",
    default="",
    metavar="HOST",
    help="With --recover: let the keeper on HOST recover the run.",
)
@click.option(
    "--probe",
    default="",
    metavar="1%|STEPS",
    help="Run this share or number of steps first. Then show the time and cost of the whole run, "
    "and ask whether to start it.",
)
@click.option(
    "--gpus",
    type=NumberRange(2, 0, 64),
    default=0,
    metavar="N",
    help="Use N GPUs of the server, with a process of the program on each (torchrun). 0: all.",
)
@FROM_TRIAL
@TIMINGS
@yes_option
@json_option
@click.argument(
    "command",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[-- COMMAND]",
    shell_complete=complete_files,
)
@click.pass_context
def run_command(ctx: click.Context, /, yes: bool, timings: bool, **values: Any) -> None:
    """Run COMMAND (default: `run` in lab.yaml) in a container on the server and follow its log.

    Ctrl-C stops following the log; the run continues. Exits with the command's exit code.

    With --up and --down, labctl starts a server, runs COMMAND, downloads the results and removes
    the server. --down keeps a server that another run or forward uses.

    \b
    labctl run
    labctl run --up --down
    labctl run -- python train.py --epochs 20
    labctl run --detach --id night
    labctl run --probe 1%
    labctl run --recover
    labctl run --recover --keeper HOST --detach
    """
    options = RunOptions(**values)
    assert isinstance(ctx.command, OwnCommand)
    require_compatible(options, partial(ctx.command.find_default, ctx))
    lab = open_lab(ctx, yes=yes, quiet=options.json_, timings=timings)
    options = choose_command(lab, options)
    started_runs: list[Run] = []
    work = partial(_start_and_follow, ctx, lab, options, started_runs)
    with print_timings_of_failure(ctx, quiet=options.json_):
        if options.up or options.down:
            ctx.exit(run_server.run_with_server(lab, options, started_runs, work))
        with hold_use(lab.context.state, lab.id, "run"):
            run = work()
    if run is not None:
        ctx.exit(_finish(ctx, lab, run, options.json_))


def _start_and_follow(
    ctx: click.Context, lab: Lab, options: RunOptions, started_runs: list[Run]
) -> Run | None:
    """Start the run and follow it; None if only the probe ran. Ctrl-C ends labctl, not the run.

    The run is added to `started_runs` once it has started.
    """
    push = not options.no_push
    if options.probe and not (options.run_id and lab.context.state.get_run(lab.id, options.run_id)):
        if not confirm_after_probe(
            ctx, lab, options.command, options.probe, push=push, json_=options.json_
        ):
            return None
        push = options.recover  # the probe has just pushed it
    screen: Screen = ctx.meta[SCREEN]
    waiting = LogSilenceLine(screen, lambda run_id: describe_activity(lab.top(), lab.id, run_id))
    follow = not options.detach and not options.tty

    def report_start(run: Run, found: bool) -> None:
        screen.emit(Step(name=STARTING, done=True, brief=True))
        started_runs.append(run)
        stop_drawing(ctx)
        if not options.json_:
            is_queued = run.state == "starting" and run.summary
            event = "found" if found else "queued" if is_queued else "started"
            text = clean(f"run {run.id} {event}: {shlex.join(run.command)}")
            click.echo("\n  ".join(wrap_lines(text, 2, has_commands=False)), err=True)
            if is_queued:
                print_message(f"  {clean(run.summary)}")
            if follow:
                waiting.start(run.id)

    screen.emit(Step(name=STARTING, brief=True))
    try:
        run = lab.run(
            options.command,
            id=options.run_id,
            follow=follow,
            tty=options.tty,
            held=options.tty,
            push=push,
            recover=options.recover,
            keeper=options.keeper,
            gpus=options.gpus,
            on_start=report_start,
            on_log=waiting.watch_log(_make_log_writer(ctx, options.json_)),
        ).last_known
    except NameTakenError as error:
        raise name_options.add_free_name(lab, options.run_id, error) from None
    except KeyboardInterrupt as interrupt:
        waiting.stop()
        stop_drawing(ctx)
        if not started_runs and options.down:
            raise
        if not started_runs:
            raise _make_interrupt_error(lab, awaits_start=screen.awaits_start) from None
        leave_interrupted_line(has_output=waiting.is_line_open)
        if options.down:
            run_server.note_interrupt(lab, started_runs[0].id, interrupt)
        _print_still_running(lab, started_runs[0], recovers=options.recover)
        ctx.exit(INTERRUPTED)
    finally:
        waiting.stop()
    if (timeline := find_timeline(ctx)) and not options.json_:
        timeline.print_once()
    if options.tty and not run.has_ended:
        return _attach(ctx, lab, run)
    return run


def _make_interrupt_error(lab: Lab, *, awaits_start: bool) -> InterruptError:
    """Make the error of a Ctrl-C before the server has confirmed the run's start."""
    down = f"labctl down   # instead, to {adoption.describe_down(lab.context)}"
    if awaits_start:
        return InterruptError(
            "interrupted while the run started",
            why="the server may have started it",
            hint=f"labctl status --refresh   # shows whether it runs\n{down}",
        )
    return InterruptError(
        "interrupted before the run started",
        why="the server keeps the finished build steps and the files that it has",
        hint=f"{read_typed_command()}   # continues\n{down}",
    )


def _attach(ctx: click.Context, lab: Lab, run: Run) -> Run:
    """Attach this terminal to the run, and return it as it ended.

    Exit with the code of ssh if the run has not ended, or if the terminal was lost or refused.
    """
    run, code = run_terminal.attach_terminal(lab.context, run)
    if run.has_ended and code == run.exit_code:
        return run
    if run.state != "starting":
        run_end.print_run(run)
    ctx.exit(code)


def _make_log_writer(ctx: click.Context, json_: bool) -> Callable[[bytes], None]:
    """Return the function that prints the log. With --timings, the table precedes the log."""
    write: Callable[[bytes], None] = (lambda block: None) if json_ else write_log
    timeline = find_timeline(ctx)
    if timeline is None:
        return write
    return timeline.watch_log(write, (lambda: None) if json_ else timeline.print_once)


def _finish(ctx: click.Context, lab: Lab, run: Run, json_: bool) -> int:
    """Print how the run ended, and return the exit code."""
    if json_:
        print_json({"run": run, **list_timings(ctx)})
    else:
        run_end.print_run(run)
        if not run.has_ended:
            _note_keeper(lab, run)
        print_new_files(lab, run)
        if run.exit_code == 0:
            print_message(f"labctl pull {run.id}    download its results")
    return find_exit_code(run) if run.has_ended else 0


def find_exit_code(run: Run) -> int:
    """Return the exit code of the run's command; 255 if it is unknown."""
    return OWN_FAILURE if run.exit_code is None else run.exit_code


def print_new_files(lab: Lab, run: Run) -> None:
    """Name the run's new files that a plain `labctl pull` leaves on the server.

    After the first run of the lab that has some, also print the line of lab.yaml for them.
    """
    if not run.new_files:
        return
    names = names_text([clean(name) for name in run.new_files], 5)
    print_message(f"new files outside outputs: {names} (labctl pull --all)")
    others = (other for other in lab.context.state.list_runs(lab.id) if other.id != run.id)
    if not any(other.new_files for other in others):
        results.print_outputs_line(lab, run.new_files)


def write_log(block: bytes) -> None:
    """Write a piece of a run's log to standard output, byte for byte."""
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()


def _note_keeper(lab: Lab, run: Run) -> str:
    """Name the keeper that watches over the run, if it has one; return its host."""
    keeper = lab.keeper and recovery_lock.find_keeper(lab.context, run.id)
    if keeper:
        print_message(f"The keeper at {keeper} watches over it; you can turn this machine off.")
    return keeper


def _print_still_running(lab: Lab, run: Run, *, recovers: bool) -> None:
    cost = price_or_free_text(gang.sum_prices(lab.context))
    print_message(f"run {run.id} is still running ({cost})")
    keeper = _note_keeper(lab, run)
    follow = (f"labctl logs -f {run.id}", "follow the log again")
    if recovers and not keeper:
        # Only this command recovers the run; `logs -f` would let it end with its server.
        follow = (f"labctl run --recover --id {run.id}", "follow it again, and recover it")
    lines = (
        follow,
        (f"labctl cancel {run.id}", "stop the run"),
        ("labctl down", adoption.describe_down(lab.context)),
    )
    for line, effect in lines:
        print_message(f"  {line:<{len(follow[0]) + 3}}{effect}")


@click.command("cancel")
@RUN
@click.option("--grace", default=60, show_default=True, help="Seconds between SIGTERM and SIGKILL.")
@json_option
@click.pass_context
def cancel_command(ctx: click.Context, run: str, grace: int, json_: bool) -> None:
    """Stop RUN (default: the latest run): SIGTERM, time for a checkpoint, then SIGKILL.

    \b
    labctl cancel
    """
    context = open_lab(ctx, quiet=json_, skips_faults=True).select_run_server(run).context
    ended_run, had_ended = cancel.cancel(context, run, grace)
    if json_:
        print_json({"run": ended_run, "already": had_ended})
    elif had_ended and not ended_run.has_ended:
        click.echo(f"run {ended_run.id} has ended with its server.")
    elif had_ended:
        text = f"run {ended_run.id} had already ended: {clean(ended_run.summary)}"
        print_message(text, err=False)
        cancel.note_remaining_runs(context, ended_run)
    else:
        print_message(f"run {ended_run.id}: {clean(ended_run.summary)}", err=False)
        run_end.print_how_to_continue(ended_run)
        cancel.note_remaining_runs(context, ended_run)

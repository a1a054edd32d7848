"""The commands push, run, ssh and cancel."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.completion_values import complete_files, complete_runs
from labctl.cli.exit_codes import INTERRUPTED, OWN_FAILURE, clean
from labctl.cli.first_output import FirstOutputLine, describe_activity
from labctl.cli.options import (
    RUN,
    SCREEN,
    SERVER,
    SSH_AT_ONCE,
    SSH_JSON,
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
from labctl.cli.plain_ssh import needs_tty, remote_line, replace_with_ssh, replace_with_start
from labctl.cli.probe import confirm_after_probe
from labctl.cli.run_options import RunOptions, require_compatible
from labctl.cli.screen import print_json
from labctl.cli.wrapping import print_message, wrap_lines
from labctl.errors import LabError, PolicyError, UsageError
from labctl.lazy import lazy_imports
from labctl.state.uses import hold_use
from labctl.text import bytes_text, names_text, price_or_free_text
from labctl.wire.runs import GPU_LEASE

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Run

with lazy_imports(__name__):
    from labctl import config
    from labctl.cli import fan_out, results, run_server
    from labctl.lifecycle import cancel, recovery_lock
    from labctl.servers import adoption, gang


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
    type=click.IntRange(0, 64),
    default=0,
    metavar="N",
    help="Use N GPUs of the server, with a process of the program on each (torchrun). 0: all.",
)
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
    waiting = FirstOutputLine(
        ctx.meta[SCREEN], lambda run_id: describe_activity(lab.top(), lab.id, run_id)
    )
    follow = not options.detach and not options.tty

    def report_start(run: Run, found: bool) -> None:
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
    except KeyboardInterrupt as interrupt:
        waiting.stop()
        stop_drawing(ctx)
        if not started_runs:
            raise
        if options.down:
            run_server.note_interrupt(lab, started_runs[0].id, interrupt)
        _print_still_running(lab, started_runs[0], recovers=options.recover)
        ctx.exit(INTERRUPTED)
    finally:
        waiting.stop()
    if (timeline := find_timeline(ctx)) and not options.json_:
        timeline.print_once()
    if options.tty and not run.has_ended:
        _attach(lab, run)
    return run


def _attach(lab: Lab, run: Run) -> None:
    """Replace this process with ssh, attached to the run."""
    # A run that waits for its start is attached to before its command begins.
    if run.state == "starting":
        replace_with_start(lab.context, run)
    if not run.is_container:
        raise PolicyError(
            f"run {run.id} has a terminal already",
            why="a run without a container keeps the terminal in which it was started",
            hint=f"labctl logs -f {run.id}\nlabctl exec {run.id} -- sh   # a shell beside it",
        )
    replace_with_ssh(lab.context, f"docker attach {run.container}")


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
        print_run(run)
        if not run.has_ended:
            _note_keeper(lab, run)
        print_new_files(lab, run)
        if run.exit_code == 0:
            print_message(f"labctl pull {run.id}    download its results")
    return find_exit_code(run) if run.has_ended else 0


def print_run(run: Run) -> None:
    """Print how the run ended, and the next command."""
    if not run.has_ended:
        print_message(f"labctl logs -f {run.id}    follow its log")
        return
    print_message(f"run {run.id}: {clean(run.summary)}")
    if run.stopped_by == GPU_LEASE:
        print_message(f"labctl run --recover --id {run.id}    resume it when a GPU is free")
    elif run.stopped_by:
        print_message(f"labctl up && labctl run --recover --id {run.id}    resume it")
    elif run.state == "cancelled":
        _print_how_to_continue(run)
    elif run.exit_code:
        print_message(f"labctl explain {run.id}    why, and what to try next")


def _print_how_to_continue(run: Run) -> None:
    """Name what is left of a canceled run. Nothing resumes it; a new run can use its results."""
    pull = f"labctl pull {run.id}"
    print_message(f"{pull}    download its checkpoints and logs")
    print_message("A new run can continue from them: see docs/resume.md.")


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
    print_message(f"\nrun {run.id} is still running ({cost})")
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


class _SshCommand(click.Command):
    """`labctl ssh`, which has no option of OpenSSH: those go to the user's own ssh."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name.startswith("--"):
                raise  # OpenSSH has no such option either
            try:
                name = config.load_lab(Path(ctx.find_root().obj or ".")).name
            except LabError:
                name = "HOST"
            line = shlex.join(["ssh", *words[: words.index("--") if "--" in words else None], name])
            raise UsageError(
                f"labctl ssh has no option {error.option_name}",
                why="options of OpenSSH work with ssh itself, which knows the server by its name",
                hint=f"{line}\nlabctl ssh --help",
            ) from None


@click.command(
    "ssh",
    cls=_SshCommand,
    # Everything after the first word of COMMAND belongs to COMMAND, even `--all`.
    context_settings={"allow_interspersed_args": False},
)
@click.option("--all", "all_", is_flag=True, help="Run COMMAND on the servers of all labs.")
@SERVER
@SSH_AT_ONCE
@SSH_JSON
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
@click.pass_context
def ssh_command(
    ctx: click.Context,
    all_: bool,
    rank: int,
    at_once: int,
    json_: bool,
    command: tuple[str, ...],
) -> None:
    """Open a shell on the server, or run COMMAND there.

    With --all, COMMAND runs on the servers of all labs in parallel. The output is grouped by
    server, in order of name, and a list of failures follows. Exits with the highest exit code, or
    with 255 if a server could not be reached.

    \b
    labctl ssh
    labctl ssh -- df -h
    labctl ssh 'nvidia-smi | head'
    labctl ssh --all -- nvidia-smi -L
    """
    line = remote_line(command)
    if not all_:
        if json_:
            raise UsageError("--json needs --all", hint="labctl ssh --all --json -- COMMAND")
        replace_with_ssh(open_lab(ctx, rank=rank).context, line, tty=needs_tty(command))
    if not command:
        raise UsageError("--all needs a command", hint="labctl ssh --all -- uptime")
    ctx.exit(fan_out.run_on_all_servers(line, at_once, json_))


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
    context = open_lab(ctx, quiet=json_).context
    ended_run, had_ended = cancel.cancel(context, run, grace)
    if json_:
        print_json({"run": ended_run, "already": had_ended})
    elif had_ended and not ended_run.has_ended:
        click.echo(f"Run {ended_run.id} has ended with its server.")
    elif had_ended:
        text = f"Run {ended_run.id} had already ended: {clean(ended_run.summary)}"
        print_message(text, err=False)
        cancel.note_remaining_runs(context, ended_run)
    else:
        print_message(f"run {ended_run.id}: {clean(ended_run.summary)}", err=False)
        _print_how_to_continue(ended_run)
        cancel.note_remaining_runs(context, ended_run)

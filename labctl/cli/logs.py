"""The command logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import INTERRUPTED, clean, leave_interrupted_line
from labctl.cli.options import FOLLOW, RUN, SCREEN, TAIL, open_lab, stop_drawing
from labctl.cli.wrapping import print_message
from labctl.errors import NotFoundError
from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Run, Server

with lazy_imports(__name__):
    from labctl.cli import log_silence, rank_logs
    from labctl.cli import runs as run_commands
    from labctl.lifecycle import gang_follow, gang_runs, reconcile
    from labctl.runs import runs


@click.command("logs")
@RUN
@FOLLOW
@TAIL
@click.option(
    "--rank",
    default="0",
    metavar="N|all",
    help="Print the output of this process; all: of every process, with its rank before each line.",
)
@click.pass_context
def logs_command(ctx: click.Context, run: str, follow: bool, tail: int, rank: str) -> None:
    """Print the output of RUN (default: the latest run).

    With several servers, -f also ends the run on all of them as soon as one fails, and starts it
    again as often as `restarts` in lab.yaml says.

    \b
    labctl logs -f
    labctl logs -n 50
    labctl logs --rank 3
    """
    lab = open_lab(ctx, skips_faults=True)
    if rank != "0":
        rank_logs.print_rank_logs(lab, run, rank, follow, tail)
        return
    lab = lab.select_run_server(run)
    server = _find_server_for_logs(lab, run)
    run_id = runs.find_run(lab.context, run).id
    if server is None:
        _print_saved_log(lab, run_id, tail)
        return
    waiting = log_silence.LogSilenceLine(
        ctx.meta[SCREEN],
        lambda run_id: log_silence.describe_activity(lab.top(), lab.id, run_id),
        detail="",  # the run started some time ago
    )
    log = _CountedLog(waiting.watch_log(run_commands.write_log))
    if follow:
        waiting.start(run_id)
    try:
        if follow and gang_runs.count_parts(lab.context, run_id) > 1:
            shown = gang_follow.follow_log(lab.context, run_id, on_log=log.write, tail=tail)
        else:
            shown = runs.watch(
                lab.context, server, run_id, tail=tail, follow=follow, on_log=log.write
            )
    except KeyboardInterrupt:
        waiting.stop()
        stop_drawing(ctx)
        leave_interrupted_line(has_output=waiting.is_line_open)
        text = f"the run is still running; to follow it again: labctl logs -f {run_id}"
        print_message(text)
        ctx.exit(INTERRUPTED)
    finally:
        waiting.stop()
    _print_end_of_log(shown, has_output=log.size_bytes > 0)


class _CountedLog:
    """Passes on a log and counts its bytes."""

    def __init__(self, on_log: Callable[[bytes], None]) -> None:
        self._on_log = on_log
        self.size_bytes = 0

    def write(self, block: bytes) -> None:
        self.size_bytes += len(block)
        self._on_log(block)


def _print_end_of_log(run: Run, *, has_output: bool) -> None:
    """Print how the run ended, and that its log is empty if it is: nothing else would say so."""
    if not has_output:
        empty = "ended without output" if run.has_ended else "has not printed anything yet"
        print_message(f"run {run.id} {empty}")
    if run.has_ended:
        print_message(f"run {run.id}: {clean(run.summary)}")


def _print_saved_log(lab: Lab, run_id: str, tail: int) -> None:
    """Print the log of a run whose server has ended, from a saved or pulled copy."""
    text = reconcile.read_saved_log(lab.context, run_id)
    run_commands.write_log(_last_lines(text, tail))
    empty = "" if text else f"; run {run_id} had not printed anything"
    server = lab.context.state.get_lab_server(lab.id)
    state = "is stopped" if server is not None and server.state == "stopped" else "has ended"
    print_message(f"the run's server {state}; this is the log that was saved or pulled{empty}")


def _find_server_for_logs(lab: Lab, run: str) -> Server | None:
    """Return the server of the run's log; None if it has ended and the log was saved or pulled."""
    if lab.keeper:
        reconcile.reconcile(lab.context)
    try:
        server = lab.context.get_server()
    except NotFoundError:
        if not (_was_pulled(lab, run) or lab.keeper or lab.config.store):
            raise
        return None
    found = runs.find_run(lab.context, run)
    is_elsewhere = found.has_ended and found.server_id != server.id
    return None if is_elsewhere and _was_pulled(lab, run) else server


def _was_pulled(lab: Lab, run: str) -> bool:
    return reconcile.local_log_path(lab.context, runs.find_run(lab.context, run).id).is_file()


def _last_lines(text: bytes, count: int) -> bytes:
    return b"".join(text.splitlines(keepends=True)[-count:]) if count else text

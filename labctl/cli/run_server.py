"""`run --up` and `run --down`: start a server before the run, and remove it afterwards."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TextIO

import click

from labctl.cli import run_end, runs
from labctl.cli.down_output import describe_removal, find_exit_code, print_down
from labctl.cli.exit_codes import (
    INTERRUPTED,
    OWN_FAILURE,
    clean,
    leave_interrupted_line,
    print_error,
    read_typed_command,
)
from labctl.cli.options import SCREEN, list_timings, stop_drawing
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.errors import BuildError, InterruptError, LabError, UsageError
from labctl.events import Note
from labctl.lab import Lab
from labctl.lifecycle import run_server, status
from labctl.lifecycle.down import DownResult
from labctl.lifecycle.up import up
from labctl.model import Run, Server
from labctl.runs.probe import parse_amount
from labctl.servers import gang
from labctl.servers.open_costs import describe_open_costs
from labctl.state.uses import hold_use
from labctl.text import add_next, price_or_free_text

if TYPE_CHECKING:
    from labctl.cli.run_options import RunOptions

# Sent when a terminal closes, and by `kill` and batch systems.
END_SIGNALS = (signal.SIGHUP, signal.SIGTERM)


def require_server_options(options: RunOptions) -> None:
    """UsageError for options that contradict --up or --down, before anything costs money."""
    if options.down and options.detach:
        raise UsageError(
            "--down cannot be combined with --detach",
            why="labctl must follow the run, to remove the server after it",
            hint="labctl up --idle 30m\nlabctl run --detach\nor with a keeper:\n"
            "labctl run --recover --keeper HOST --detach",
        )
    if options.down and options.tty:
        raise UsageError(
            "--down cannot be combined with -it",
            why="a terminal that loses its connection cannot tell when the run ends",
            hint="labctl run --up -it\nlabctl down",
        )
    if options.up and options.no_push:
        raise UsageError(
            "--up cannot be combined with --no-push",
            why="a new server has no code yet",
            hint="labctl run --up",
        )
    if options.probe:
        parse_amount(options.probe)


class ServerEnd(NamedTuple):
    """The outcome of --down: the `result`, why the server is `kept`, or an `error`."""

    result: DownResult | None = None
    kept: str = ""
    error: LabError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether results or costs need attention."""
        return self.error is not None or (
            self.result is not None and find_exit_code(self.result) != 0
        )


class SignalInterrupt(KeyboardInterrupt):
    """A signal ended labctl, as Ctrl-C does; its argument is the signal's name."""


def run_with_server(
    lab: Lab, options: RunOptions, started_runs: list[Run], work: Callable[[], Run | None]
) -> int:
    """Start a server (--up), call `work`, remove the server (--down); return the exit code.

    `work` adds its run to `started_runs` once it has started.
    """
    if options.up:
        _check_run(lab, options)
    created: list[Server] = []
    with _raise_on_signals() if options.down else nullcontext():
        try:
            with hold_use(lab.context.state, lab.id, "run"):
                if options.up:
                    _start_server(lab, created.append)
                run = work()
            if run is not None and not options.json_:
                run_end.print_run(run)
            ending = _end_server(lab, run, is_own=bool(created)) if options.down else None
        except (KeyboardInterrupt, click.Abort) as interrupt:
            if not options.down:
                raise
            _exit_interrupted(lab, interrupt, started_runs)
        except InterruptError as interrupt:
            if options.down:
                run_server.record_interrupted_down(lab.context, "", interrupt.what)
            raise
        except click.exceptions.Exit:
            raise
        except Exception as error:
            if options.down and (created or started_runs):
                _end_after_failure(lab, error, is_own=bool(created))
            if isinstance(error, LabError):
                costs = describe_open_costs(lab.context, lab.id)
                error.why = "\n".join(filter(None, [error.why, *costs]))
            raise
    return _finish(lab, run, ending, options.json_)


def _check_run(lab: Lab, options: RunOptions) -> None:
    """Raise the errors of the run that this machine can find, before a server costs money."""
    lab.check_run(
        options.command, id=options.run_id, recover=options.recover, keeper=options.keeper
    )


def _start_server(lab: Lab, on_create: Callable[[Server], None]) -> None:
    """Do what `labctl up` does. The caller adds to an error what still costs money."""
    server = up(lab.context, explains_costs=False, on_create=on_create)
    cost = price_or_free_text(gang.sum_prices(lab.context))
    _stop_drawing()
    count = lab.config.server.count
    text = f"{server.alias} is" if count == 1 else f"{count} servers of {server.lab} are"
    print_message(f"{text} ready ({server.provider}, {cost}).")


def _stop_drawing() -> None:
    stop_drawing(click.get_current_context())


def _end_server(lab: Lab, run: Run | None, *, is_own: bool) -> ServerEnd:
    """Remove the server unless something else uses it; download the results in either case."""
    server_id = run.server_id if run is not None else ""
    try:
        result = run_server.end_unused(lab.context, is_own=is_own, server_id=server_id)
        return ServerEnd(result=result)
    except run_server.ServerInUseError as error:
        return ServerEnd(kept=error.why, error=_pull(lab, run))
    except LabError as error:
        # Removing a server pulls first. If it failed before that, the results are not here yet.
        _pull(lab, run)
        return ServerEnd(error=error)


def _pull(lab: Lab, run: Run | None) -> LabError | None:
    try:
        if run is not None:
            lab.pull(run.id)
    except LabError as error:
        return error
    return None


def _end_after_failure(lab: Lab, error: Exception, *, is_own: bool) -> None:
    """Remove the server after the run could not be started or followed, and report that."""
    if isinstance(error, BuildError):
        run_server.save_build_log(lab.context, error)
    try:
        result = run_server.end_unused(lab.context, is_own=is_own)
    except LabError as failure:
        note = f"--down did not remove the server: {failure.what}\n{failure.why}".strip()
        text = add_next(note, failure.hint)
        lab.context.reporter.emit(Note(text=text, level="warning"))
        return
    except KeyboardInterrupt as interrupt:
        # The error still says why the run failed, and what costs money now.
        note_interrupt(lab, "", interrupt)
        _print_server_left(lab)
        return
    _stop_drawing()
    if result.removed:
        print_message(f"--down {describe_removal(lab, result)}")


def _finish(lab: Lab, run: Run | None, ending: ServerEnd | None, json_: bool) -> int:
    """Print what became of the run and of its server, and return the exit code.

    That is the command's own code. If it is 0 and --down failed, it is OWN_FAILURE.
    """
    _stop_drawing()
    if json_ and run is not None:
        print_json(
            {"run": run, **_describe_end(ending), **list_timings(click.get_current_context())}
        )
    elif run is not None and (ending is None or ending.result is None):
        runs.print_new_files(lab, run)
    code = runs.find_exit_code(run) if run is not None and run.has_ended else 0
    if ending is None:
        return code
    if not json_:
        _print_server_end(lab, ending)
    if ending.error is not None:
        print_error(ending.error)
        _print_server_left(lab)
    return OWN_FAILURE if code == 0 and ending.has_failed else code


def _describe_end(ending: ServerEnd | None) -> Mapping[str, object]:
    """Return what --json prints about the server's end."""
    if ending is None:
        return {}
    error = ending.error.what if ending.error else ""
    return {"down": ending.result, "kept": ending.kept, "error": error}


def _print_server_end(lab: Lab, ending: ServerEnd) -> None:
    """Print what --down did on standard error; standard output has the run's log."""
    if ending.result is not None:
        print_down(lab, ending.result, err=True)
    elif ending.kept:
        print_message("--down did not remove the server:")
        for line in ending.kept.splitlines():
            print_message(f"  {clean(line)}")
        _print_server_left(lab)


def _print_server_left(lab: Lab) -> None:
    """Name the servers that are still on record, and how to remove them."""
    first = lab.context.state.get_lab_server(lab.id)
    servers = [*([first] if first else []), *status.list_other_servers(lab.context)]
    for server in servers:
        cost = describe_cost(server)
        print_message(f"  {server.alias} still exists ({server.state}, {cost})")
    if servers:
        them = "it" if len(servers) == 1 else "them"
        print_message(f"  labctl down      download the results, then remove {them}")


def describe_cost(server: Server | None) -> str:
    """Write what the server costs per hour, or "free"."""
    price = server.offer.price_usd_per_hour if server else 0.0
    return price_or_free_text(price)


def note_interrupt(lab: Lab, run_id: str, interrupt: BaseException) -> None:
    """Record that --down was interrupted, then say so. A lost terminal is no error."""
    name = str(interrupt) if isinstance(interrupt, SignalInterrupt) else "Ctrl-C"
    run_server.record_interrupted_down(lab.context, run_id, name)
    try:
        _stop_drawing()
        is_question = isinstance(interrupt, click.Abort)
        leave_interrupted_line(has_output=is_question)
        print_message(f"labctl run --down was interrupted ({name})")
    except OSError:  # the reader of a pipe is gone
        _discard_output(sys.stderr)


def _discard_output(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _exit_interrupted(lab: Lab, interrupt: BaseException, started_runs: Sequence[Run]) -> NoReturn:
    """Exit after an interruption before the run began or after it ended."""
    note_interrupt(lab, "", interrupt)
    if not started_runs and not click.get_current_context().meta[SCREEN].awaits_start:
        print_message(f"  the run had not started; to continue: {read_typed_command()}")
    _print_server_left(lab)
    print_message("  labctl status    show what is running")
    raise click.exceptions.Exit(INTERRUPTED) from interrupt


@contextmanager
def _raise_on_signals() -> Iterator[None]:
    """Let SIGHUP and SIGTERM interrupt like Ctrl-C, so that labctl can say what still runs.

    A signal that is ignored, as under nohup, stays ignored. Output to a terminal that has closed is
    discarded: an error of the progress bars would count as one of the run, which ends the server.
    """
    terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for stream in terminals:
            if not stream.isatty():
                _discard_output(stream)
        # A closing terminal sends several; the first one decides.
        for other in END_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise SignalInterrupt(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # a handler that was not installed by Python
                signal.signal(number, handler)

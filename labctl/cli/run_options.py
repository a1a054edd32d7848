"""The options of `labctl run`, and which of them go together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from labctl.cli.from_trial import require_trial
from labctl.cli.own_command import EXAMPLE, require_program
from labctl.errors import LabError, UsageError
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    from labctl.cli import run_server


class RunOptions(NamedTuple):
    """The options of `run`; "" means not given."""

    detach: bool
    run_id: str
    tty: bool
    no_push: bool
    up: bool
    down: bool
    recover: bool
    keeper: str
    probe: str
    gpus: int
    from_trial: str
    json_: bool
    command: tuple[str, ...]


def require_compatible(
    options: RunOptions, find_default: Callable[[], Sequence[str]] = lambda: EXAMPLE
) -> None:
    """UsageError for options that contradict each other. `find_default` reads the lab's `run`."""
    require_program("labctl run", options.command, find_default)
    require_trial(options)
    if options.recover and (
        (options.detach and not options.keeper) or options.tty or options.no_push
    ):
        raise _make_recover_conflict_error()
    if options.keeper and not options.recover:
        raise _make_keeper_without_recover_error(options.keeper)
    if options.probe and options.tty:
        raise _make_probe_with_terminal_error()
    if options.gpus and options.probe:
        raise UsageError(
            "--gpus cannot be combined with --probe",
            why="a probe measures the run as lab.yaml describes it",
            hint="labctl run --probe 1%",
        )
    if options.up or options.down:
        run_server.require_server_options(options)
    if options.tty:
        _require_terminal(options)


def _require_terminal(options: RunOptions) -> None:
    """UsageError if -it cannot attach a terminal. Called before the run exists."""
    if options.detach:
        raise UsageError(
            "-it cannot be combined with --detach",
            why="a detached run has no terminal attached",
            hint="labctl run -it",
        )
    if not sys.stdin.isatty():
        raise UsageError(
            "-it needs a terminal",
            why="standard input is not a terminal",
            hint="labctl run --up" if options.up else "labctl run",
        )


def _make_recover_conflict_error() -> LabError:
    return UsageError(
        "--recover cannot be combined with --detach, -it or --no-push",
        why="it follows the run, and keeps the code that it sent, for a new server",
        hint="labctl run --recover   # with --keeper HOST, --detach is allowed",
    )


def _make_keeper_without_recover_error(keeper: str) -> LabError:
    return UsageError(
        "--keeper needs --recover",
        why="a keeper recovers the runs that are handed over to it",
        hint=f"labctl run --recover --keeper {keeper}",
    )


def _make_probe_with_terminal_error() -> LabError:
    return UsageError(
        "--probe cannot be combined with -it",
        why="a probe run has no terminal attached",
        hint="labctl run --probe 1%",
    )

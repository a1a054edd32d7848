"""`labctl run -it`: the user's terminal on a run, and what became of the run afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from labctl.cli.exit_codes import OWN_FAILURE
from labctl.cli.plain_ssh import build_ssh_argv, make_missing_ssh_error
from labctl.errors import LabError, PolicyError
from labctl.lazy import lazy_imports
from labctl.retry import poll_until

if TYPE_CHECKING:
    from labctl.model import Run
    from labctl.servers.context import LabContext

with lazy_imports(__name__):
    from labctl.commands import run_shell
    from labctl.runs import runs

# seconds in which a command that has ended is seen to have ended
ENDING_S = 5.0
# What a terminal or a batch system sends. ssh gets Ctrl-C and Ctrl-\ from the terminal itself.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_PASSED_ON = (signal.SIGHUP, signal.SIGTERM)


def attach_terminal(context: LabContext, run: Run) -> tuple[Run, int]:
    """Attach this terminal to the run until it ends; return the run and the exit code of ssh.

    The run's new state is recorded. If the server does not reply, the run is returned as it was.
    PolicyError for a running run without a container.
    """
    line = _build_line(run)
    code = _run_ssh(build_ssh_argv(context, line))
    current = run

    def has_ended() -> bool:
        nonlocal current
        server = context.get_server()
        record = runs.fetch_run(context, server, run.id)
        current = runs.record_run(context, server, record) if record else current
        return current.has_ended

    with suppress(LabError):
        poll_until(has_ended, pause_s=0.2, deadline_s=0.0 if code == OWN_FAILURE else ENDING_S)
    return current, code


def _build_line(run: Run) -> str:
    # A run that waits for its start is attached to before its command begins.
    if run.state == "starting":
        return run_shell.build_start_line(run.is_container, run.id, run.container)
    if not run.is_container:
        raise PolicyError(
            f"run {run.id} has a terminal already",
            why="a run without a container keeps the terminal in which it was started",
            hint=f"labctl logs -f {run.id}\nlabctl exec {run.id} -- sh   # a shell beside it",
        )
    return f"docker attach {run.container}"


def _run_ssh(argv: list[str]) -> int:
    """Run ssh with this process's terminal; return its exit code."""
    sys.stdout.flush()
    try:
        process = subprocess.Popen(argv)
    except FileNotFoundError:
        raise make_missing_ssh_error() from None
    with _leave_signals_to(process):
        code = process.wait()
    return OWN_FAILURE if code < 0 else code


@contextmanager
def _leave_signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let signals end ssh, not this process, which records afterwards what became of the run."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number in _PASSED_ON:
            process.send_signal(number)

    numbers = (*_FROM_TERMINAL, *_PASSED_ON)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

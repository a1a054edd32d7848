"""The tmux session beside a run, for people. Killing it does not touch the run."""

from __future__ import annotations

import shlex
from pathlib import Path

from ...wire.runs import RunRequest, SessionReply
from ..host.docker import OPENED_LATER, run_tmux
from .executor import Executor
from .executors import get_executor
from .records import read_last_attempt
from .run_state import UNENDED, inspect_run, require_run_directory
from .spec import read_spec

BEST_SHELL = "command -v bash >/dev/null && exec bash; exec sh"


def build_session_words(executor: Executor, directory: Path, attempt: str) -> list[str]:
    """Return the words after `tmux` that open the run's session: windows run, monitor, shell.

    Killing the session does not touch the run. If it exists already, tmux changes nothing.
    """
    name = f"labctl-{directory.name}"
    log = directory / "logs" / "run.log"
    monitor = "command -v nvidia-smi >/dev/null && exec watch -n 2 nvidia-smi; exec top"
    shell = shlex.join(executor.build_exec_words(attempt, ["sh", "-c", BEST_SHELL]))
    shell += " 2>/dev/null || { "
    shell += f"echo 'This shell is on the server, not in the {executor.noun} of the run.'"
    shell += "; exec ${SHELL:-sh}; }"
    return [
        *("new-session", "-d", "-s", name, "-n", "run", "-c", str(directory)),
        *("-x", "200", "-y", "50", f"exec tail -n +1 -F {shlex.quote(str(log))}", ";"),
        *("new-window", "-d", "-t", f"={name}:", "-n", "monitor", monitor, ";"),
        *("new-window", "-d", "-t", f"={name}:", "-n", "shell", shell, ";"),
        *("set-option", "-t", f"={name}:", "status-right", " leave: Ctrl-b d ", ";"),
        # tmux cuts the name of the session, which has the run's id, after 10 characters.
        *("set-option", "-t", f"={name}:", "status-left-length", "40"),
    ]


def open_session(request: RunRequest) -> SessionReply:
    """Return the name of a run's tmux session, created again if it is gone."""
    directory = require_run_directory(request.lab, request.lab_id, request.run)
    container = read_last_attempt(directory).container
    has_ended = inspect_run(directory, {}).state not in UNENDED
    executor = get_executor(read_spec(directory).executor)
    name = f"labctl-{directory.name}"
    mark = ["set-option", "-t", f"={name}:", OPENED_LATER, "on"] if has_ended else []
    if mark:
        run_tmux(*mark)  # a session that is still there, for which the next line does nothing
    run_tmux(*build_session_words(executor, directory, container), *([";", *mark] if mark else []))
    return SessionReply(name, has_ended)

"""The docker and tmux commands on the server. A run's start uses engine.py instead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ...wire.verbs import SHOW_DOCKER
from ..reply import Failure
from .background import build_scope_words
from .retry import repeat_pause, retry_on

if TYPE_CHECKING:
    from subprocess import CompletedProcess

# seconds to wait for a daemon that is being restarted
ATTEMPTS_S = 20.0
PAUSE_S = 0.5


class UnreachableEngineError(Failure):
    """The Docker Engine is installed and does not accept connections."""

    def __init__(self, why: str) -> None:
        what = "the Docker Engine on the server does not answer"
        super().__init__("engine", what, why, SHOW_DOCKER)


def run_program(
    words: Sequence[str], *, stdin: str | None = None, variables: dict[str, str] | None = None
) -> CompletedProcess[str]:
    """Run a program with what it prints captured, and `variables` added to the environment."""
    import subprocess  # imported here: a run's start does not need it

    return subprocess.run(
        words,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **(variables or {})},
        check=False,
    )


def run_docker(*args: str, check: bool = True) -> CompletedProcess[str]:
    """Run one docker command. While the daemon does not answer, retry for ATTEMPTS_S."""

    def run_once() -> CompletedProcess[str]:
        try:
            done = run_program(["docker", *args], stdin="")
        except FileNotFoundError:
            what = "Docker is not installed on the server"
            raise Failure("engine", what, hint="labctl doctor") from None
        # The docker command exits with 1 for every error.
        if done.returncode != 0 and "Cannot connect to the Docker daemon" in done.stderr:
            raise UnreachableEngineError(done.stderr.strip())
        return done

    done = retry_on(UnreachableEngineError, run_once, repeat_pause(PAUSE_S, ATTEMPTS_S))
    if check and done.returncode != 0:
        raise Failure("docker", f"docker {args[0]} failed", done.stderr.strip()[-2000:])
    return done


def run_tmux(*args: str) -> CompletedProcess[str]:
    return run_program(_tmux_words(args))


# Set in a session that was opened after its run had ended.
OPENED_LATER = "@opened_later"


def end_session(run_id: str) -> None:
    """End the tmux session of a run that has ended: now, or once its last viewer has left it.

    One that was opened for a viewer after the end stays, since the viewer may be on the way.
    """
    target = f"=labctl-{run_id}:"
    end = f"set-option -t {target} destroy-unattached on"
    with suppress(FileNotFoundError):
        run_tmux("if-shell", "-F", "-t", target, f"#{{?{OPENED_LATER},,1}}", end)


def _tmux_words(args: tuple[str, ...]) -> list[str]:
    """Return the argv.

    A new session may start tmux's server, which must outlive this login.
    """
    return [*(build_scope_words() if args[0] == "new-session" else []), "tmux", *args]

"""The docker and tmux commands on the server. A run's start uses engine.py instead."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ...wire.verbs import SHOW_DOCKER
from ..reply import Failure
from .background import build_scope_words

if TYPE_CHECKING:
    from subprocess import CompletedProcess

# seconds to wait for a daemon that is being restarted
ATTEMPTS_S = 20.0


def run_docker(*args: str, check: bool = True) -> CompletedProcess[str]:
    """Run one docker command. While the daemon does not answer, retry for ATTEMPTS_S."""
    import subprocess  # imported here: a run's start does not need it

    deadline = time.monotonic() + ATTEMPTS_S
    while True:
        try:
            done = subprocess.run(
                ["docker", *args], input="", capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            what = "Docker is not installed on the server"
            raise Failure("engine", what, hint="labctl doctor") from None
        # The docker command exits with 1 for every error.
        is_unreachable = (
            done.returncode != 0 and "Cannot connect to the Docker daemon" in done.stderr
        )
        if is_unreachable and time.monotonic() < deadline:
            time.sleep(0.5)
            continue
        break
    if is_unreachable:
        raise Failure(
            "engine",
            "the Docker Engine on the server does not answer",
            done.stderr.strip(),
            SHOW_DOCKER,
        )
    if check and done.returncode != 0:
        raise Failure("docker", f"docker {args[0]} failed", done.stderr.strip()[-2000:])
    return done


def run_tmux(*args: str) -> CompletedProcess[str]:
    import subprocess

    words = _tmux_words(args)
    return subprocess.run(words, capture_output=True, text=True, check=False)


def end_session(run_id: str) -> None:
    """End the tmux session of a run that has ended: now, or once its last viewer has left it."""
    with suppress(FileNotFoundError):
        run_tmux("set-option", "-t", f"=labctl-{run_id}:", "destroy-unattached", "on")


def spawn_tmux(*args: str) -> None:
    """Run tmux without waiting for it: people open the session later than the reply arrives."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    words = _tmux_words(args)
    with suppress(FileNotFoundError):
        os.posix_spawnp(words[0], words, os.environ, file_actions=null)


def _tmux_words(args: tuple[str, ...]) -> list[str]:
    """Return the argv.

    A new session may start tmux's server, which must outlive this login.
    """
    return [*(build_scope_words() if args[0] == "new-session" else []), "tmux", *args]

"""Processes that outlive the login that started them.

logind may kill a session's processes when the session closes (KillUserProcesses=yes in
logind.conf). Processes of the account's own service manager survive while the account lingers.
"""

from __future__ import annotations

import os
import pwd
import select
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LINGERING = Path("/var/lib/systemd/linger")
RUNTIME = Path("/run/user")
# How long a shell may take to leave the session: longer than systemd-run's own limit of 25 s.
DEPARTURE_S = 30.0


def build_scope_words() -> list[str]:
    """Return the words before a command that run it in a scope of the account's service manager.

    [] for root, whose processes logind does not kill, and where there is no such manager or it ends
    with the last session: a scope would end with it.
    """
    runtime = RUNTIME / str(os.getuid())
    if os.geteuid() == 0 or not is_lingering():
        return []
    if not (runtime / "systemd" / "private").exists():
        return []
    variable = f"XDG_RUNTIME_DIR={runtime}"
    return ["env", variable, "systemd-run", "--user", "--scope", "--quiet", "--collect", "--"]


class BackgroundShell:
    """A shell outside the session of this login. It starts while the caller does other work.

    It may get one script, which `run` sends. Without that, it ends with the block.
    """

    def __init__(self) -> None:
        self._script, self._departure = _start_shell(build_scope_words())

    def run(self, script: str) -> None:
        """Have the shell run a script, without waiting for that; return once a logout is harmless.

        Until systemd-run has moved the shell, a logout would end it with the session. So the shell
        says when it runs. If the service manager refuses to move it, it runs in the session: a
        logout ends it only where logind.conf says so.
        """
        if not self._send(script):
            self._close()
            self._script, self._departure = _start_shell([])
            self._send(script)

    def _send(self, script: str) -> bool:
        """Send the script; return whether the shell runs or may still start."""
        with suppress(BrokenPipeError):
            os.write(self._script, f"echo; exec >&2\n{script}\n".encode())
        ready, _, _ = select.select([self._departure], [], [], DEPARTURE_S)
        return not ready or bool(os.read(self._departure, 1))

    def _close(self) -> None:
        os.close(self._script)
        os.close(self._departure)

    def __enter__(self) -> BackgroundShell:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def _start_shell(before: Sequence[str]) -> tuple[int, int]:
    """Start `sh` with the words `before` it; return the ends of its standard input and output."""
    stdin, script = os.pipe()
    departure, stdout = os.pipe()
    actions = [
        (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, stdout, 1),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0),
    ]
    words = [*before, "sh"]
    with suppress(OSError, NotImplementedError):
        os.posix_spawnp(words[0], words, os.environ, file_actions=actions, setsid=True)
    os.close(stdin)
    os.close(stdout)
    return script, departure


def is_lingering() -> bool:
    """Return whether the account's service manager runs without a session."""
    return (LINGERING / pwd.getpwuid(os.getuid()).pw_name).exists()


def ask_to_linger() -> None:
    """Enable lingering for the account, where the machine's rules allow an account to do so."""
    import subprocess  # imported here: a run's start does not need it

    if os.geteuid() == 0 or is_lingering() or not Path("/run/systemd/system").is_dir():
        return
    words = ["loginctl", "--no-ask-password", "enable-linger"]
    subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)

"""Processes that outlive the login that began them.

logind may end whatever a session has begun when it closes (KillUserProcesses=yes in logind.conf).
What belongs to the account's own service manager stays, as long as the account lingers.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

LINGERING = Path("/var/lib/systemd/linger")
RUNTIME = Path("/run/user")


def scope_words() -> list[str]:
    """The words before a command that put it into a scope of the account's service manager.

    None for root, whom logind leaves alone, and where there is no such manager or it ends with the
    last session: a scope would end with it.
    """
    runtime = RUNTIME / str(os.getuid())
    if os.geteuid() == 0 or not is_lingering():
        return []
    if not (runtime / "systemd" / "private").exists():
        return []
    variable = f"XDG_RUNTIME_DIR={runtime}"
    return ["env", variable, "systemd-run", "--user", "--scope", "--quiet", "--collect", "--"]


def is_lingering() -> bool:
    """Whether the account's service manager runs without a session."""
    return (LINGERING / pwd.getpwuid(os.getuid()).pw_name).exists()


def ask_to_linger() -> None:
    """Have the account's service manager stay, where the machine's rules let the account say so."""
    import subprocess  # not for a run's start, which waits for no process

    if os.geteuid() == 0 or is_lingering() or not Path("/run/systemd/system").is_dir():
        return
    words = ["loginctl", "--no-ask-password", "enable-linger"]
    subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)

"""Processes that outlive the login that started them.

logind may kill a session's processes when the session closes (KillUserProcesses=yes in
logind.conf). Processes of the account's own service manager survive while the account lingers.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

LINGERING = Path("/var/lib/systemd/linger")
RUNTIME = Path("/run/user")


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

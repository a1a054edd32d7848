"""Messages to people: in every terminal, in tmux, and in the log of each live run."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from ..host.paths import labctl_home
from .activity import LabAccount


def notify(account: LabAccount, text: str, runs: list[Path]) -> None:
    """Send `text` once to every terminal, log and tmux client, ignoring those that hang."""
    lines = split_sentences(text)
    message = "".join(["\r\n", *(f"*** labctl: {line} ***\r\n" for line in lines)]).encode()
    for terminal in Path("/dev/pts").glob("[0-9]*"):
        with suppress(OSError):
            _write(terminal, message, os.O_NOCTTY | os.O_NONBLOCK)
    for log in runs:
        with suppress(OSError):
            content = "".join(f"labctl: {line}\n" for line in lines).encode()
            _write(log, content, os.O_APPEND | os.O_NOFOLLOW)
    for socket in Path(f"/tmp/tmux-{account.uid}").glob("*"):
        with suppress(OSError, subprocess.SubprocessError):
            _notify_tmux([*account.words, "tmux", "-S", str(socket)], text)


def split_sentences(text: str) -> list[str]:
    """Return the sentences: one a line fits a terminal, which would break a command in two."""
    return text.replace(". ", ".\n").split("\n")


def _notify_tmux(tmux: list[str], text: str) -> None:
    escaped = text.replace("#", "##").replace("%", "%%")
    words = [*tmux, "list-clients", "-F", "#{client_name}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False)
    for client in done.stdout.split():
        words = [*tmux, "display-message", "-c", client, f"labctl: {escaped}"]
        subprocess.run(words, capture_output=True, timeout=5, check=False)


def _write(path: Path, content: bytes, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def list_run_logs(run_ids: list[str]) -> list[Path]:
    """Return the logs of these runs, in any lab."""
    matches_by_run = (labctl_home().glob(f"*/runs/{run}/logs/run.log") for run in run_ids)
    return [log for matches in matches_by_run for log in matches]

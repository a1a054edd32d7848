"""Messages to people: in every terminal, in tmux, and in the log of each live run."""

from __future__ import annotations

import os
import subprocess
import textwrap
from contextlib import suppress
from pathlib import Path

from ..host.paths import labctl_home
from .activity import LabAccount

# how long tmux shows a notice, unless a key is pressed
SHOWN_MS = 20_000
CLIENT_FORMAT = "#{client_width} #{client_name}"
LEAST_MESSAGE_WIDTH = 10


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
    """Show a notice in the status line of each client, whose width tmux would cut it to."""
    prefix = _read_tmux(tmux, "show-options", "-gv", "prefix").strip().replace("C-", "Ctrl-")
    for client in _read_tmux(tmux, "list-clients", "-F", CLIENT_FORMAT).splitlines():
        width, _, name = client.partition(" ")
        for message in fit_status_line(f"labctl: {text}", int(width), prefix):
            escaped = message.replace("#", "##").replace("%", "%%")
            words = [*tmux, "display-message", "-c", name]
            stay = ["-d", str(SHOWN_MS)]  # which tmux before 3.2 does not know
            if _run_tmux([*words, *stay, escaped]).returncode:
                _run_tmux([*words, escaped])


def fit_status_line(text: str, width: int, prefix: str) -> list[str]:
    """Return the messages to show one after the other; only the last must fit into `width` columns.

    tmux keeps the whole text in its log of messages, which the last one names.
    """
    if len(text) <= width:
        return [text]
    rest = f" ({prefix} ~: all)"
    # A shorter beginning would be meaningless.
    room = max(width - len(rest), LEAST_MESSAGE_WIDTH)
    return [text, textwrap.shorten(text, room, placeholder=" …") + rest]


def _read_tmux(tmux: list[str], *words: str) -> str:
    return _run_tmux([*tmux, *words]).stdout


def _run_tmux(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=5, check=False)


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

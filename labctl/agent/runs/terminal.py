"""Run a program in a terminal of its own, which this terminal shows and a log records.

`python3 terminal.py LOG PROGRAM ARGUMENT...` ends with the program's exit code. If this terminal's
connection is lost, the program keeps its own one, and its output goes to the log alone.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import sys
import termios
import tty
from contextlib import suppress

STDIN, STDOUT = 0, 1
BLOCK_BYTES = 65536
# What os.waitpid gives for a program that a signal ended, as shells report it
SIGNALLED = 128


def main() -> int:
    log_path, *words = sys.argv[1:]
    # A lost connection hangs up this terminal, but not the program's own one.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pid, master = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execvp(words[0], words)
    _copy_size(master)
    signal.signal(signal.SIGWINCH, lambda *_: _copy_size(master))
    before = termios.tcgetattr(STDIN)
    tty.setraw(STDIN)
    try:
        with open(log_path, "ab", buffering=0) as log:  # noqa: PTH123 (as the agent's other scripts)
            _relay(master, log.fileno())
    finally:
        with suppress(termios.error, OSError):  # the connection is lost
            termios.tcsetattr(STDIN, termios.TCSADRAIN, before)
    status = os.waitpid(pid, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else SIGNALLED + os.WTERMSIG(status)


def _copy_size(master: int) -> None:
    with suppress(OSError):
        size = fcntl.ioctl(STDIN, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(master, termios.TIOCSWINSZ, size)


def _relay(master: int, log: int) -> None:
    """Relay both directions until the program and all that it started have left its terminal."""
    sources = [master, STDIN]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if master in ready:
            block = _read(master)
            if not block:
                return
            with suppress(OSError):
                os.write(STDOUT, block)
            with suppress(OSError):  # the disk is full
                os.write(log, block.replace(b"\r\n", b"\n"))
        if STDIN in ready:
            block = _read(STDIN)
            if block:
                os.write(master, block)
            else:
                sources.remove(STDIN)


def _read(source: int) -> bytes:
    """Return what can be read; b"" at the end, which a terminal reports as an error."""
    try:
        return os.read(source, BLOCK_BYTES)
    except OSError:
        return b""


if __name__ == "__main__":
    sys.exit(main())

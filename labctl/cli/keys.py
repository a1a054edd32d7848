"""What is typed at the terminal: keys while another thread draws, and what nobody has read."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread


def discard_typed_input() -> None:
    """Discard what was typed before a question: it is no answer to it."""
    if sys.stdin.isatty():
        # If the terminal is gone, the question fails by itself.
        with suppress(OSError, termios.error):
            termios.tcflush(sys.stdin, termios.TCIFLUSH)


@contextmanager
def read_keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` in a thread for each key. The terminal is as before afterwards.

    Ctrl-C stays a signal. If standard input is not a terminal, no keys are read.
    """
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    reading, writing = os.pipe()
    thread = Thread(target=_read, args=(terminal, reading, on_key), daemon=True)
    tty.setcbreak(terminal)
    try:
        thread.start()
        yield
    finally:
        os.write(writing, b"x")
        thread.join()
        os.close(reading)
        os.close(writing)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _read(terminal: int, end: int, on_key: Callable[[str], None]) -> None:
    while True:
        ready, _, _ = select.select([terminal, end], [], [])
        if end in ready:
            return
        key = os.read(terminal, 1)
        if not key:  # the terminal is gone
            return
        on_key(key.decode(errors="replace"))

"""Frame a command line so that its output and exit code can be trusted.

A login shell may print a banner from its start-up files, and ssh exits with 255 both when it
fails itself and when the command did. So the framed line first prints a random mark on both
streams (anything before it comes from the shell or ssh, not from the command) and, only if the
command exits with 255, the mark again on stderr. A 255 without that second mark is ssh's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from labctl.model import Value
from labctl.shell import Command, portable_line

KEPT_NOISE_BYTES = 64 * 1024


class Frame(Value, frozen=True):
    """A line ready to be sent, and the mark to look for in its output."""

    line: str
    mark: bytes


def frame(line: Command | str) -> Frame:
    """Frame a POSIX shell line for any login shell."""
    text = line.render() if isinstance(line, Command) else line
    word = os.urandom(8).hex()
    script = (
        f'm=\'\\001{word}\\002\'; printf "$m"; printf "$m" >&2\n(\n{text}\n)\n'
        'c=$?; [ $c -ne 255 ] || printf "$m" >&2; exit $c'
    )
    return Frame(line=portable_line(script), mark=b"\x01" + word.encode() + b"\x02")


class MarkedOutputParser:
    """Splits one stream of a framed line: `noise` before the mark, output passed to `deliver`.

    `begun`: the mark was found, so the line was started. `ended_255`: the mark came a second time,
    which is checked only with `twice`. Output is passed on at once, except for a tail that may be
    the start of a mark.
    """

    def __init__(
        self, mark: bytes, deliver: Callable[[bytes], None], *, twice: bool = False
    ) -> None:
        self.mark = mark
        self.deliver = deliver
        self.twice = twice
        self.noise = b""
        self.begun = False
        self.ended_255 = False
        self._held = b""

    def feed(self, chunk: bytes) -> None:
        if self.begun and not self.twice:
            self._take(chunk)
            return
        data = self._held + chunk
        self._held = b""
        while True:
            before, mark, after = data.partition(self.mark)
            if not mark:
                break
            self._take(before)
            self.ended_255 = self.begun
            self.begun = True
            data = after
            if not self.twice:
                self._take(data)
                return
        held = _count_mark_start(self.mark, data)
        self._held = data[len(data) - held :]
        self._take(data[: len(data) - held])

    def finish(self) -> None:
        """Pass on the held tail: the stream has ended, so it was output."""
        held, self._held = self._held, b""
        self._take(held)

    def _take(self, data: bytes) -> None:
        if not self.begun:
            self.noise = (self.noise + data)[-KEPT_NOISE_BYTES:]
        elif data:
            self.deliver(data)


def _count_mark_start(mark: bytes, data: bytes) -> int:
    """Count the bytes at the end of `data` that are the start of `mark`."""
    start = data.rfind(mark[:1], max(0, len(data) - len(mark) + 1))
    while start != -1:
        if mark.startswith(data[start:]):
            return len(data) - start
        start = data.rfind(mark[:1], max(0, len(data) - len(mark) + 1), start)
    return 0

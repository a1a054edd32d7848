"""Live logs: each is read once for all its watchers, and only while there are any.

A log is sent to the browser as text: control characters are removed, and HTML is escaped.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fastapi.sse import format_sse_event
from markupsafe import Markup

from labctl.errors import ConnectError, LabError
from labctl.web.mutations import LogReader

# lines from the end of a log that are shown first
LINES = 400
# characters of a log that are kept in memory for the next watcher
KEPT = 256 * 1024
# largest amount to read at a time; of more, only the end is shown. 40 logs of programs that print
# without end must fit into the keeper's memory
MOST_BYTES = 1024**2
# shortest and longest pause between two reads
SOON_S, LATE_S = 0.7, 5.0
MAX_LOGS = 12
BEAT_S = 15.0
# characters that a page may show; above it, the page starts again with those that are kept
MAX_SHOWN = 400_000
MAX_LINE = 20_000
# state until the server has answered; the page shows it from the beginning
READING = "loading"
LEFT_OUT = "[earlier output is not shown]\n"
STEERING = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
ODD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
KEEP_ALIVE = format_sse_event(comment="still here")
Open = Callable[[], LogReader]


class LogStreams:
    """The logs that are open in a browser, by seat and run; at most `most` of them."""

    def __init__(self, most: int = MAX_LOGS) -> None:
        self._most = most
        self._tails: dict[tuple[str, str], _SharedLog] = {}

    async def watch(self, seat: str, run: str, open_: Open) -> AsyncIterator[bytes]:
        """Yield server-sent events: the log so far, its new lines, and how the run ended."""
        key = (seat, run)
        tail = self._tails.get(key)
        if tail is None:
            if len(self._tails) >= self._most:
                yield encode_log_event(
                    "state", "too many logs are open: close one and reload this page"
                )
                yield encode_log_event("end")
                return
            tail = self._tails[key] = _SharedLog(open_)
        try:
            # Close it explicitly; otherwise it would count as a watcher until it is collected.
            async with contextlib.aclosing(tail.watch()) as blocks:
                async for block in blocks:
                    yield block
        finally:
            if not tail.watchers and self._tails.get(key) is tail:
                del self._tails[key]
                tail.close()


class _SharedLog:
    """A log that is read once for all its watchers."""

    def __init__(self, open_: Open) -> None:
        self._open = open_
        # the complete lines as shown, and the line that is still being written
        self.text = ""
        self.rest = ""
        # characters that were dropped from the beginning of `text`
        self.dropped = 0
        # increases when the following text does not continue the previous one
        self.era = 0
        self.cut = False
        self.state = READING
        self.ended = False
        self.watchers = 0
        self.changed = asyncio.Event()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        self._task.cancel()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield events for one watcher until the run has ended."""
        self.watchers += 1
        position, era, shown = 0, -1, 0
        rest, state = "", READING
        try:
            yield format_sse_event(retry=3000)
            while True:
                end = self.dropped + len(self.text)
                if era != self.era or position < self.dropped or shown > MAX_SHOWN:
                    left_out = LEFT_OUT if self.cut or self.dropped else ""
                    yield encode_log_event("begin", left_out + self.text)
                    position, era, shown = end, self.era, len(self.text)
                elif position < end:
                    yield encode_log_event("lines", self.text[position - self.dropped :])
                    position, shown = end, shown + end - position
                elif self.last_line != rest:
                    rest = self.last_line
                    yield encode_log_event("rest", rest)
                elif self.state != state:
                    state = self.state
                    yield encode_log_event("state", state)
                elif self.ended:
                    yield encode_log_event("end")
                    return
                else:
                    try:
                        await asyncio.wait_for(self.changed.wait(), BEAT_S)
                    except TimeoutError:
                        yield KEEP_ALIVE
        finally:
            self.watchers -= 1

    @property
    def last_line(self) -> str:
        return clean_line(self.rest)

    async def _run(self) -> None:
        pause_s = SOON_S
        reading: LogReader | None = None
        while not self.ended:
            blocks: list[bytes] = []
            try:
                if reading is None:
                    reading = await asyncio.to_thread(self._open)
                gaps_before = reading.began_anew
                await asyncio.to_thread(reading.read_on, blocks.append)
                self._append(b"".join(blocks), has_gap=reading.began_anew != gaps_before)
                if reading.run.has_ended:
                    self.ended = True
                    self.state = (
                        reading.run.summary or f"the run has ended: {reading.run.state_text}"
                    )
                else:
                    self.state = ""
            except ConnectError as error:
                self.state = f"{error.what}; retrying"
            except LabError as error:
                self.ended, self.state = True, error.what
            pause_s = SOON_S if blocks else min(LATE_S, pause_s * 1.5)
            self._notify_watchers()
            await asyncio.sleep(pause_s)

    def _append(self, data: bytes, *, has_gap: bool) -> None:
        if has_gap:
            self._decoder.reset()
            self._restart()
        text = self.rest + self._decoder.decode(data)
        if len(text) > KEPT:
            # Only the end of this much text is kept, so only the end is cleaned.
            self._restart()
            text = text[len(text) - KEPT :].partition("\n")[2]
        *lines, rest = text.split("\n")
        self.rest = rest[-MAX_LINE:]
        self.text += "".join(f"{clean_line(line)}\n" for line in lines)
        if len(self.text) > KEPT:
            excess = len(self.text) - KEPT
            excess = self.text.find("\n", excess) + 1 or excess
            self.text, self.dropped = self.text[excess:], self.dropped + excess

    def _restart(self) -> None:
        """Show the following text as a new log whose beginning is left out."""
        self.text, self.rest, self.dropped, self.cut = "", "", 0, True
        self.era += 1

    def _notify_watchers(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def clean_line(line: str) -> str:
    """Return a line as a terminal would show it: after its last carriage return, without escapes.

    Control and direction characters become U+FFFD.
    """
    plain = STEERING.sub("", line).rstrip("\r")
    return ODD.sub("\ufffd", plain.rpartition("\r")[2])


def encode_log_event(name: str, text: str = "") -> bytes:
    """Encode a server-sent event with an element of escaped text; it is never empty."""
    return format_sse_event(event=name, data_str=Markup("<span>{}</span>").format(text))

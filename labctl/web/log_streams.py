"""Live logs: each is read once, however many look at it, and only as long as somebody does.

A log goes to the browser as text, whatever is in it: cleaned, escaped and put in by htmx.
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
from labctl.web.mutations import Reading

# Before the end, where a log begins to be shown.
LINES = 400
# Characters of a log that are held for whoever opens it next.
KEPT = 256 * 1024
# Of what came since the last look; more is a flood, of which the end is shown.
MOST_BYTES = 8 * 1024**2
SOON_S, LATE_S = 0.7, 5.0
MOST_TAILS = 12
BEAT_S = 15.0
# Characters of it that a page may hold; above it begins anew with those that are kept.
MOST_SHOWN = 400_000
MOST_LINE = 20_000
# Until the server has answered once; the page says so by itself from the beginning.
READING = "reading"
LEFT_OUT = "[what came before is left out]\n"
STEERING = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
ODD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
KEEP_ALIVE = format_sse_event(comment="still here")
Open = Callable[[], Reading]


class Tails:
    """The logs that somebody looks at now, by seat and run."""

    def __init__(self) -> None:
        self._tails: dict[tuple[str, str], _Tail] = {}

    async def watch(self, seat: str, run: str, open_: Open) -> AsyncIterator[bytes]:
        """Server-sent events: what is there, then what comes, then how the run ended."""
        key = (seat, run)
        tail = self._tails.get(key)
        if tail is None:
            if len(self._tails) >= MOST_TAILS:
                yield log_event("state", "too many logs are open: close one, then load anew")
                yield log_event("end")
                return
            tail = self._tails[key] = _Tail(open_)
        try:
            # Closed here, or it would count as a watcher until somebody tidies up.
            async with contextlib.aclosing(tail.watch()) as blocks:
                async for block in blocks:
                    yield block
        finally:
            if not tail.watchers and self._tails.get(key) is tail:
                del self._tails[key]
                tail.close()


class _Tail:
    def __init__(self, open_: Open) -> None:
        self._open = open_
        # What is whole of the log, as it is shown; then the line that is still being written.
        self.text = ""
        self.rest = ""
        # Characters that are gone from the beginning of `text`.
        self.dropped = 0
        # Grows where what follows does not go on from what was before.
        self.era = 0
        self.cut = False
        self.told = READING
        self.ended = False
        self.watchers = 0
        self.changed = asyncio.Event()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        self._task.cancel()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        self.watchers += 1
        place, era, shown = 0, -1, 0
        rest, told = "", READING
        try:
            yield format_sse_event(retry=3000)
            while True:
                end = self.dropped + len(self.text)
                if era != self.era or place < self.dropped or shown > MOST_SHOWN:
                    left_out = LEFT_OUT if self.cut or self.dropped else ""
                    yield log_event("begin", left_out + self.text)
                    place, era, shown = end, self.era, len(self.text)
                elif place < end:
                    yield log_event("lines", self.text[place - self.dropped :])
                    place, shown = end, shown + end - place
                elif self.last_line != rest:
                    rest = self.last_line
                    yield log_event("rest", rest)
                elif self.told != told:
                    told = self.told
                    yield log_event("state", told)
                elif self.ended:
                    yield log_event("end")
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
        reading: Reading | None = None
        while not self.ended:
            blocks: list[bytes] = []
            try:
                if reading is None:
                    reading = await asyncio.to_thread(self._open)
                before = reading.began_anew
                await asyncio.to_thread(reading.read_on, blocks.append)
                self._take(b"".join(blocks), anew=reading.began_anew != before)
                if reading.run.ended:
                    self.ended = True
                    self.told = reading.run.told or f"the run has ended: {reading.run.state}"
                else:
                    self.told = ""
            except ConnectError as error:
                self.told = f"{error.what}; trying again"
            except LabError as error:
                self.ended, self.told = True, error.what
            pause_s = SOON_S if blocks else min(LATE_S, pause_s * 1.5)
            self._ring()
            await asyncio.sleep(pause_s)

    def _take(self, data: bytes, *, anew: bool) -> None:
        if anew:
            self._decoder.reset()
            self._forget()
        text = self.rest + self._decoder.decode(data)
        if len(text) > KEPT:
            # Of so much only the end is kept, so only the end is cleaned.
            self._forget()
            text = text[len(text) - KEPT :].partition("\n")[2]
        *lines, rest = text.split("\n")
        self.rest = rest[-MOST_LINE:]
        self.text += "".join(f"{clean_line(line)}\n" for line in lines)
        if len(self.text) > KEPT:
            gone = len(self.text) - KEPT
            gone = self.text.find("\n", gone) + 1 or gone
            self.text, self.dropped = self.text[gone:], self.dropped + gone

    def _forget(self) -> None:
        """Show what comes next as a new log, of which the beginning is left out."""
        self.text, self.rest, self.dropped, self.cut = "", "", 0, True
        self.era += 1

    def _ring(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def clean_line(line: str) -> str:
    """A line as a terminal would leave it: a carriage return begins it anew, nothing steers."""
    plain = STEERING.sub("", line).rstrip("\r")
    return ODD.sub("\ufffd", plain.rpartition("\r")[2])


def log_event(name: str, text: str = "") -> bytes:
    """One server-sent event: an element with this text, escaped. Without one it is not empty."""
    return format_sse_event(event=name, data_str=Markup("<span>{}</span>").format(text))

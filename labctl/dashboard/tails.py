"""Live logs: each is read once, however many look at it, and only as long as somebody does."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from labctl.dashboard.deeds import Reading
from labctl.errors import ConnectError, LabError

LINES = 400
"""Before the end, where a log begins to be shown."""
KEPT = 256 * 1024
"""Characters of a log that are held for whoever opens it next."""
MOST_BYTES = 8 * 1024**2
"""Of what came since the last look; more is a flood, of which the end is shown."""
SOON_S, LATE_S = 0.7, 5.0
MOST_TAILS = 12
BEAT_S = 15.0
READING = "reading"
"""Until the server has answered once; the page says so by itself from the beginning."""
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
                yield event("end", {"text": "too many logs are open: close one, then load anew"})
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
        self.text = ""
        self.dropped = 0
        """Characters that are gone from the beginning of `text`."""
        self.era = 0
        """Grows where what follows does not go on from what was before."""
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
        place, era, told = 0, -1, READING
        try:
            yield b"retry: 3000\n\n"
            while True:
                if told == READING and self.text:
                    told = ""  # the page sees that by the text
                if era != self.era or place < self.dropped:
                    began = "cut" if self.cut or self.dropped else "start"
                    yield event("message", {"begin": began, "text": self.text})
                    place, era = self.dropped + len(self.text), self.era
                elif place < self.dropped + len(self.text):
                    yield event("message", {"text": self.text[place - self.dropped :]})
                    place = self.dropped + len(self.text)
                elif self.told != told:
                    told = self.told
                    yield event("end" if self.ended else "told", {"text": told})
                elif self.ended:
                    return
                else:
                    try:
                        await asyncio.wait_for(self.changed.wait(), BEAT_S)
                    except TimeoutError:
                        yield b": still here\n\n"
        finally:
            self.watchers -= 1

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
            self.text, self.dropped, self.cut = "", 0, True
            self.era += 1
        self.text += self._decoder.decode(data)
        if len(self.text) > KEPT:
            gone = len(self.text) - KEPT
            gone = self.text.find("\n", gone) + 1 or gone
            self.text, self.dropped = self.text[gone:], self.dropped + gone

    def _ring(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def event(name: str, body: dict[str, str]) -> bytes:
    """One server-sent event; JSON has no line ends in it."""
    return f"event: {name}\ndata: {json.dumps(body)}\n\n".encode()

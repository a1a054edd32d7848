"""One course, many watchers: a snapshot is taken once, drawn once, and sent where it differs.

A page is made of parts. Each part is a piece of HTML under an id and remembers in which version it
last changed, so a browser that names its version gets what it lacks, after a cut link too. Each is
sent as an event of its own, and htmx puts it in the place of what has its id.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
from fastapi.sse import format_sse_event

from labctl.errors import LabError
from labctl.web.view import Snapshot

# Between two looks while somebody watches; longer where a look itself takes long.
EVERY_S = 3.0
# Of a core, at most, goes into looking and drawing.
SHARE = 0.02
# After so long without news a watcher is told so: a dead link shows.
BEAT_S = 15.0
FORGET_S = 60.0

RELOAD = format_sse_event(event="reload", data_str="1")
BEAT = format_sse_event(event="beat", data_str="1")

Parts = dict[str, str]
Draw = Callable[[Snapshot], Parts]


@dataclass
class Channel:
    """One page as it is drawn now. `shape` is the version in which its ids last changed."""

    draw: Draw
    drawn: Snapshot | None = None
    version: int = 0
    shape: int = 0
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)
    watchers: int = 0
    used_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    events: dict[int, bytes] = field(default_factory=dict)

    def take(self, parts: Parts) -> bool:
        """Replace what differs; whether anything does."""
        new = [name for name, html in parts.items() if self.parts.get(name, ("",))[0] != html]
        reshaped = list(parts) != list(self.parts)
        if not new and not reshaped:
            return False
        self.version += 1
        if reshaped:
            self.shape = self.version
        before = self.parts
        self.parts = {
            name: (html, self.version if name in new else before[name][1])
            for name, html in parts.items()
        }
        self.events.clear()
        return True

    def event(self, since: int) -> bytes:
        """What a browser lacks that has version `since`; the same bytes for all of them."""
        known = self.events.get(since)
        if known is None:
            if since < self.shape or since > self.version:
                known = RELOAD
            else:
                new = [html for html, version in self.parts.values() if version > since]
                known = b"".join(format_sse_event(event="part", data_str=html) for html in new)
            self.events[since] = known
        return known


class Feed:
    """Takes snapshots with `take`, in a thread of its own. Used from one event loop."""

    def __init__(self, take: Callable[[], Snapshot], every_s: float) -> None:
        # Tells this process's versions from those of one before.
        self.boot = secrets.token_hex(4)
        self._take = take
        self._every_s = every_s
        self._snapshot: Snapshot | None = None
        self._taken_at = 0.0
        self._cost_s = 0.0
        self._trouble = ""
        self._channels: dict[str, Channel] = {}
        self._looking = asyncio.Lock()
        self._watched = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def close(self) -> None:
        """End every stream, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._closed = True
        for channel in self._channels.values():
            channel.changed.set()

    async def snapshot(self) -> Snapshot:
        """The course, at most as old as the pause between two looks. LabError: there is none."""
        async with self._looking:
            if self._snapshot is None or time.monotonic() - self._taken_at >= self._pause_s():
                await asyncio.to_thread(self._look)
        if self._snapshot is None:
            raise LabError("the course cannot be read", why=self._trouble)
        return self._snapshot

    async def renew(self) -> None:
        """Look at once, and tell whoever watches: something was done."""
        async with self._looking:
            await asyncio.to_thread(self._look)
        await self._tell()

    def version(self, channel: Channel) -> str:
        """What a browser that has the channel as it is now names when it asks for more."""
        return f"{self.boot}-{channel.version}"

    @property
    def trouble(self) -> str:
        """Why the last look failed; what is shown is older then."""
        return self._trouble

    def _pause_s(self) -> float:
        return max(self._every_s, self._cost_s / SHARE)

    def _look(self) -> None:
        begun = time.thread_time()
        try:
            self._snapshot = self._take()
            self._trouble = ""
        except LabError as error:
            self._trouble = f"{error.what}: {error.why}" if error.why else error.what
            if self._snapshot is not None:
                notes = (f"what is shown is old: {self._trouble}",)
                self._snapshot = msgspec.structs.replace(self._snapshot, notes=notes)
        self._cost_s = time.thread_time() - begun
        self._taken_at = time.monotonic()

    async def page(self, name: str, draw: Draw) -> Channel:
        """The channel of this name with the newest that there is drawn on it."""
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = Channel(draw)
        channel.used_at = time.monotonic()
        snapshot = await self.snapshot()
        self._draw(channel, snapshot)
        return channel

    def _draw(self, channel: Channel, snapshot: Snapshot) -> None:
        if channel.drawn is snapshot:
            return
        begun = time.thread_time()
        changed = channel.take(channel.draw(snapshot))
        channel.drawn = snapshot
        self._cost_s += time.thread_time() - begun
        if changed:
            channel.changed.set()
            channel.changed = asyncio.Event()

    async def watch(self, name: str, draw: Draw, since: str) -> AsyncIterator[bytes]:
        """Server-sent events for a browser that has version `since`, `BOOT-NUMBER`."""
        channel = await self.page(name, draw)
        boot, _, number = since.partition("-")
        # Another process's numbers mean nothing here: whatever is shown is loaded anew.
        seen = int(number) if boot == self.boot and number.isdecimal() else -1
        channel.watchers += 1
        self._watched.set()
        try:
            yield format_sse_event(retry=2000)
            while not self._closed:
                if seen != channel.version:
                    # The version comes last: cut off before it, a browser gets all of it again.
                    yield channel.event(seen) + format_sse_event(id=self.version(channel))
                    seen = channel.version
                    continue
                try:
                    await asyncio.wait_for(channel.changed.wait(), BEAT_S)
                except TimeoutError:
                    yield BEAT
        finally:
            channel.watchers -= 1

    async def run(self) -> None:
        """Look and tell as long as somebody watches; for ever, until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            await self._watched.wait()
            await asyncio.sleep(self._pause_s())
            if not any(one.watchers for one in self._channels.values()):
                self._watched.clear()
                self._forget()
                continue
            with contextlib.suppress(LabError):
                await self.snapshot()
            await self._tell()

    async def _tell(self) -> None:
        if self._snapshot is None:
            return
        for channel in [one for one in self._channels.values() if one.watchers]:
            self._draw(channel, self._snapshot)
            await asyncio.sleep(0)
        self._forget()

    def _forget(self) -> None:
        """Let go of pages that nobody has looked at for a while."""
        long_ago = time.monotonic() - FORGET_S
        for name, one in list(self._channels.items()):
            if not one.watchers and one.used_at < long_ago:
                del self._channels[name]

    @property
    def watched(self) -> list[str]:
        """The names of the pages that somebody has open."""
        return [name for name, one in list(self._channels.items()) if one.watchers]

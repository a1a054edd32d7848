"""Live updates: a snapshot of the course is taken once, drawn once, and its changes are sent.

A page consists of parts. A part is a piece of HTML with an id, and records in which version it last
changed. So a browser that names its version gets the parts that it lacks, even after its connection
was cut. Each part is an event, and htmx replaces the element with its id.
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

# time between two snapshots while a page is open; longer if a snapshot takes long
EVERY_S = 3.0
# largest share of a core that is spent on snapshots and drawing
SHARE = 0.02
# time without changes after which a heartbeat is sent, so that a dead connection is noticed
BEAT_S = 15.0
# time after which a page without watchers is dropped
FORGET_S = 60.0

RELOAD = format_sse_event(event="reload", data_str="1")
BEAT = format_sse_event(event="beat", data_str="1")

Parts = dict[str, str]
Draw = Callable[[Snapshot], Parts]


@dataclass
class Channel:
    """A page as last drawn. `shape` is the version in which its set of ids last changed."""

    draw: Draw
    drawn: Snapshot | None = None
    version: int = 0
    shape: int = 0
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)
    watchers: int = 0
    used_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    events: dict[int, bytes] = field(default_factory=dict)

    def replace_parts(self, parts: Parts) -> bool:
        """Replace the parts that differ, and return whether there were any."""
        changed = [name for name, html in parts.items() if self.parts.get(name, ("",))[0] != html]
        has_new_shape = list(parts) != list(self.parts)
        if not changed and not has_new_shape:
            return False
        self.version += 1
        if has_new_shape:
            self.shape = self.version
        before = self.parts
        self.parts = {
            name: (html, self.version if name in changed else before[name][1])
            for name, html in parts.items()
        }
        self.events.clear()
        return True

    def encode_event(self, since: int) -> bytes:
        """Return the events for browsers with version `since`; encoded once for all of them."""
        data = self.events.get(since)
        if data is None:
            if since < self.shape or since > self.version:
                data = RELOAD
            else:
                changed = [html for html, version in self.parts.values() if version > since]
                data = b"".join(format_sse_event(event="part", data_str=html) for html in changed)
            self.events[since] = data
        return data


class Feed:
    """Takes snapshots with `replace_parts`, in a thread, and sends changes.

    Used from one event loop.
    """

    def __init__(self, take: Callable[[], Snapshot], every_s: float) -> None:
        # distinguishes the versions of this process from those of an earlier one
        self.boot = secrets.token_hex(4)
        self._take = take
        self._every_s = every_s
        self._snapshot: Snapshot | None = None
        self._taken_at = 0.0
        self._cost_s = 0.0
        self._trouble = ""
        self._channels: dict[str, Channel] = {}
        self._snapshot_lock = asyncio.Lock()
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

    async def read_snapshot(self) -> Snapshot:
        """Return a snapshot, at most as old as the pause between two; LabError if all failed."""
        async with self._snapshot_lock:
            is_old = time.monotonic() - self._taken_at >= self._pause_s()
            if self._snapshot is None or not self._taken_at or is_old:
                await asyncio.to_thread(self._take_snapshot)
        if self._snapshot is None:
            raise LabError("the course cannot be read", why=self._trouble)
        return self._snapshot

    def forget_cost(self) -> None:
        """Forget what the work so far took: the first time is slow, and later ones are not."""
        self._cost_s = 0.0

    def expire(self) -> None:
        """Let the next page take a new snapshot, which reads only what has changed since."""
        self._cost_s = self._taken_at = 0.0

    async def renew(self) -> None:
        """Take a snapshot now and notify all watchers, after an action."""
        async with self._snapshot_lock:
            await asyncio.to_thread(self._take_snapshot)
        await self._notify_watchers()

    def version(self, channel: Channel) -> str:
        """Return the version that a browser with the current channel sends to get changes."""
        return f"{self.boot}-{channel.version}"

    @property
    def trouble(self) -> str:
        """Why the last snapshot failed; the pages show an older one then."""
        return self._trouble

    def _pause_s(self) -> float:
        return max(self._every_s, self._cost_s / SHARE)

    def _take_snapshot(self) -> None:
        start_s = time.thread_time()
        try:
            self._snapshot = self._take()
            self._trouble = ""
        except LabError as error:
            self._trouble = f"{error.what}: {error.why}" if error.why else error.what
            if self._snapshot is not None:
                notes = (f"this page is out of date: {self._trouble}",)
                self._snapshot = msgspec.structs.replace(self._snapshot, notes=notes)
        self._cost_s = time.thread_time() - start_s
        self._taken_at = time.monotonic()

    async def open_channel(self, name: str, draw: Draw) -> Channel:
        """Return the channel of this name, drawn from the newest snapshot."""
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = Channel(draw)
        channel.used_at = time.monotonic()
        snapshot = await self.read_snapshot()
        self._draw(channel, snapshot)
        return channel

    def _draw(self, channel: Channel, snapshot: Snapshot) -> None:
        if channel.drawn is snapshot:
            return
        start_s = time.thread_time()
        changed = channel.replace_parts(channel.draw(snapshot))
        channel.drawn = snapshot
        self._cost_s += time.thread_time() - start_s
        if changed:
            channel.changed.set()
            channel.changed = asyncio.Event()

    async def watch(self, name: str, draw: Draw, since: str) -> AsyncIterator[bytes]:
        """Yield server-sent events for a browser that has version `since`, `BOOT-NUMBER`."""
        channel = await self.open_channel(name, draw)
        boot, _, number = since.partition("-")
        # Numbers of another process mean nothing here, so the page is reloaded.
        sent = int(number) if boot == self.boot and number.isdecimal() else -1
        channel.watchers += 1
        self._watched.set()
        try:
            yield format_sse_event(retry=2000)
            while not self._closed:
                if sent != channel.version:
                    # The version comes last: a browser that was cut off before gets all again.
                    yield channel.encode_event(sent) + format_sse_event(id=self.version(channel))
                    sent = channel.version
                    continue
                try:
                    await asyncio.wait_for(channel.changed.wait(), BEAT_S)
                except TimeoutError:
                    yield BEAT
        finally:
            channel.watchers -= 1

    async def run(self) -> None:
        """Take snapshots and notify watchers while a page is open, until the task is canceled."""
        self._loop = asyncio.get_running_loop()
        while True:
            await self._watched.wait()
            await asyncio.sleep(self._pause_s())
            if not any(channel.watchers for channel in self._channels.values()):
                self._watched.clear()
                self._drop_unused_channels()
                continue
            with contextlib.suppress(LabError):
                await self.read_snapshot()
            await self._notify_watchers()

    async def _notify_watchers(self) -> None:
        if self._snapshot is None:
            return
        for channel in [channel for channel in self._channels.values() if channel.watchers]:
            self._draw(channel, self._snapshot)
            await asyncio.sleep(0)
        self._drop_unused_channels()

    def _drop_unused_channels(self) -> None:
        oldest = time.monotonic() - FORGET_S
        for name, channel in list(self._channels.items()):
            if not channel.watchers and channel.used_at < oldest:
                del self._channels[name]

    @property
    def open_pages(self) -> list[str]:
        """The names of the pages that are open in a browser."""
        return [name for name, channel in list(self._channels.items()) if channel.watchers]

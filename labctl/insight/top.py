"""The server as it is now: samples of a second each, over one channel, through cut links."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from labctl.errors import CommandError, ConnectError
from labctl.insight.telemetry import GpuSample
from labctl.model import Server, Value
from labctl.runs.runs import look_where_it_is
from labctl.servers.context import Ground

LONGEST_PAUSE_S = 10.0
MOST_LINE_BYTES = 4 * 1024**2


class GpuNow(GpuSample, frozen=True):
    """A GPU of the server. `parent` is the card's uuid where it is a MIG instance of one."""

    index: str = ""
    parent: str = ""


class OnGpu(Value, frozen=True):
    """That a process computes on a GPU; None where its memory there is not told."""

    uuid: str = ""
    memory_bytes: int | None = None


class RunNow(Value, frozen=True):
    """One container: a run (of anybody's on this server), a service, or what somebody started.

    Of `run` and `service` at most one is set. `person` is the account that it runs as. `gpus` are
    uuids. Disk and network are totals since it began.
    """

    name: str
    run: str = ""
    service: str = ""
    lab: str = ""
    lab_id: str = ""
    person: str = ""
    started_at: str = ""
    cpu_cores: float | None = None
    cores: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    shm_bytes: int | None = None
    shm_limit_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    net_in_bytes: int | None = None
    net_out_bytes: int | None = None
    processes: int | None = None
    gpus: tuple[str, ...] = ()
    step: float | None = None
    total_steps: float | None = None

    @property
    def started_s(self) -> float | None:
        """Unix time, None where the engine did not tell."""
        try:
            return datetime.fromisoformat(self.started_at[:19]).replace(tzinfo=UTC).timestamp()
        except ValueError:
            return None


class ProcessNow(Value, frozen=True):
    """A process that computes, on a processor or a GPU; `name` is its container's, "" for none."""

    pid: int
    person: str = ""
    command: str = ""
    name: str = ""
    run: str = ""
    service: str = ""
    lab: str = ""
    lab_id: str = ""
    cpu_cores: float = 0.0
    memory_bytes: int = 0
    gpus: tuple[OnGpu, ...] = ()


class ServerNow(Value, frozen=True):
    """One second of a server. `at` is its own clock; rates are None in the very first sample."""

    at: float
    cores: float
    load: float = 0.0
    cpu_cores: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    net_in_bytes_per_s: float | None = None
    net_out_bytes_per_s: float | None = None
    gpus: tuple[GpuNow, ...] = ()
    runs: tuple[RunNow, ...] = ()
    processes: tuple[ProcessNow, ...] = ()


def look(ground: Ground) -> ServerNow:
    """The lab's server now, of two readings half a second apart. CommandError: it is silent."""
    seen: list[ServerNow] = []
    _stream(ground, ground.server(), {"count": 1}, seen.append)
    if not seen:
        raise CommandError("the server told nothing about itself", code=1, hint="labctl doctor")
    return seen[-1]


def follow(
    ground: Ground,
    on_sample: Callable[[ServerNow], None],
    *,
    interval_s: float = 1.0,
    on_cut: Callable[[ConnectError, float], None] = lambda error, pause_s: None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Every sample as it comes, until `on_sample` raises (or a person interrupts).

    `on_cut` is told of a lost link and of the seconds until the next try. NotFoundError where the
    server is removed meanwhile; a link that never was is a ConnectError.
    """
    heard = False
    pause_s = 0.5

    def sampled(now: ServerNow) -> None:
        nonlocal heard, pause_s
        heard, pause_s = True, 0.5
        on_sample(now)

    while True:
        try:
            _stream(ground, ground.server(), {"interval_s": interval_s}, sampled)
            raise CommandError("the server's program ended", code=0, hint="labctl top")
        except ConnectError as error:
            if not heard:
                raise
            on_cut(error, pause_s)
            look_where_it_is(ground, ground.server())
        pause(pause_s)
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


def _stream(
    ground: Ground,
    server: Server,
    request: dict[str, Any],
    on_sample: Callable[[ServerNow], None],
) -> None:
    lines = _Lines(on_sample)
    ground.remote(server).stream("top", request, on_reply=lambda reply: None, on_bytes=lines.feed)


class _Lines:
    """Cuts bytes into lines, and reads each as a sample; what is none is passed over."""

    def __init__(self, on_sample: Callable[[ServerNow], None]) -> None:
        self.on_sample = on_sample
        self.rest = b""
        self.decoder = msgspec.json.Decoder(ServerNow)

    def feed(self, block: bytes) -> None:
        *lines, self.rest = (self.rest + block).split(b"\n")
        if len(self.rest) > MOST_LINE_BYTES:
            self.rest = b""
        for line in lines:
            try:
                found = self.decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            self.on_sample(found)

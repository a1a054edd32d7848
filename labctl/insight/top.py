"""Live metrics of the server: a sample per second over one channel, with reconnects."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from labctl.errors import AuthenticationError, CommandError, ConnectError, HostKeyError, LabError
from labctl.insight.telemetry import GpuSample
from labctl.model import Server, Value
from labctl.parallel import CanceledError, is_canceled
from labctl.retry import ReconnectPolicy
from labctl.runs.runs import refresh_address
from labctl.servers.context import LabContext
from labctl.servers.job_queue import has_job_queue
from labctl.wire.telemetry import TOP, TopRequest

MOST_LINE_BYTES = 4 * 1024**2
# of one of several servers: as long, at most, as the view takes to end
LONGEST_PAUSE_S = 2.0
# one sample takes half a second, and the driver of a broken GPU may never answer
SAMPLE_TIMEOUT_S = 30.0


class GpuMetrics(GpuSample, frozen=True):
    """A GPU of the server. For a MIG instance, `parent` is the uuid of its GPU."""

    index: str = ""
    parent: str = ""


class GpuUse(Value, frozen=True):
    """A process's use of a GPU. `memory_bytes` is None if not reported."""

    uuid: str = ""
    memory_bytes: int | None = None


class ContainerMetrics(Value, frozen=True):
    """One container: a run of any user of the server, a service, or another container.

    At most one of `run` and `service` is set. `person` is the account that it runs as. `gpus` are
    uuids. Disk and network are totals since its start.
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
        """Unix second of the start; None if the engine did not report it."""
        try:
            return datetime.fromisoformat(self.started_at[:19]).replace(tzinfo=UTC).timestamp()
        except ValueError:
            return None


class ProcessMetrics(Value, frozen=True):
    """A process that uses a CPU or a GPU; `name` is that of its container, "" for none."""

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
    gpus: tuple[GpuUse, ...] = ()


class ServerMetrics(Value, frozen=True):
    """The metrics of one second. `at` is the server's clock; rates are None in the first sample."""

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
    gpus: tuple[GpuMetrics, ...] = ()
    runs: tuple[ContainerMetrics, ...] = ()
    processes: tuple[ProcessMetrics, ...] = ()


def measure_now(context: LabContext) -> ServerMetrics:
    """Measure the lab's server now, over half a second.

    CommandError without a sample, BusyError if it does not come in time.
    """
    samples: list[ServerMetrics] = []
    request = TopRequest(samples=1)
    _stream(context, context.get_server(), request, samples.append, timeout_s=SAMPLE_TIMEOUT_S)
    if not samples:
        raise CommandError("the server sent no metrics", code=1, hint="labctl doctor")
    return samples[-1]


def follow(
    context: LabContext,
    on_sample: Callable[[ServerMetrics], None],
    *,
    interval_s: float = 1.0,
    on_cut: Callable[[ConnectError, float], None] = lambda error, pause_s: None,
) -> None:
    """Pass each sample to `on_sample` until that raises, or the user interrupts.

    `on_cut` is called with a lost connection's error and the seconds until the next try.
    NotFoundError if the server is removed meanwhile; ConnectError if the first connection fails.
    """
    was_connected = False

    def receive(now: ServerMetrics) -> None:
        nonlocal was_connected
        was_connected = True
        policy.reset()
        on_sample(now)

    def handle_cut(error: ConnectError, pause_s: float) -> None:
        if not was_connected:
            raise error
        on_cut(error, pause_s)
        refresh_address(context, context.get_server())

    policy = ReconnectPolicy(ConnectError, on_cut=handle_cut)
    policy(lambda: _stream_samples(context, context.get_server(), interval_s, receive))


def follow_always(
    context: LabContext,
    on_sample: Callable[[ServerMetrics], None],
    on_cut: Callable[[LabError, float], None],
) -> None:
    """Do what `follow` does for one of several servers, which must not end the view of the others.

    A LabError leads to another try, also before the first sample, but not a login that the server
    refuses, which it may count, nor a wrong host key of a server that has not moved: these are
    raised. `on_cut` may raise, too. Ends if its part (see labctl.parallel) is canceled.
    """
    server: Server | None = None

    def stream() -> None:
        nonlocal server
        server = context.get_server()
        _stream_samples(context, server, 1.0, receive)

    def receive(now: ServerMetrics) -> None:
        policy.reset()
        on_sample(now)

    def handle_cut(error: LabError, pause_s: float) -> None:
        if is_canceled():
            raise CanceledError
        on_cut(error, pause_s)
        if server is not None:
            refresh_address(context, server)
        has_wrong_key = isinstance(error, HostKeyError) and not _has_moved(context, server)
        if has_wrong_key or isinstance(error, AuthenticationError):
            raise error

    policy = ReconnectPolicy(LabError, on_cut=handle_cut, longest_pause_s=LONGEST_PAUSE_S)
    policy(stream)


def _has_moved(context: LabContext, server: Server | None) -> bool:
    """Whether the lab's server on record is another one now, or has another address."""
    current = context.state.get_lab_server(context.lab_id)
    if current is None or server is None:
        return False
    return (current.id, current.endpoint) != (server.id, server.endpoint)


def _stream_samples(
    context: LabContext,
    server: Server,
    interval_s: float,
    on_sample: Callable[[ServerMetrics], None],
) -> None:
    """Stream samples; CommandError if the stream ends, which it does not by itself."""
    _stream(context, server, TopRequest(interval_s), on_sample)
    raise CommandError(
        "the labctl agent on the server ended unexpectedly", code=0, hint="labctl top"
    )


def _stream(
    context: LabContext,
    server: Server,
    request: TopRequest,
    on_sample: Callable[[ServerMetrics], None],
    *,
    timeout_s: float | None = None,
) -> None:
    lines = _SampleLines(on_sample)
    if has_job_queue(context):
        request = request._replace(job_of=context.lab_id)
    context.open_agent(server).stream(
        TOP, request, on_reply=lambda opening: None, on_bytes=lines.feed, timeout_s=timeout_s
    )


class _SampleLines:
    """Splits bytes into lines and parses each as a sample; invalid lines are skipped."""

    def __init__(self, on_sample: Callable[[ServerMetrics], None]) -> None:
        self.on_sample = on_sample
        self.rest = b""
        self.decoder = msgspec.json.Decoder(ServerMetrics)

    def feed(self, block: bytes) -> None:
        *lines, self.rest = (self.rest + block).split(b"\n")
        if len(self.rest) > MOST_LINE_BYTES:
            self.rest = b""
        for line in lines:
            try:
                sample = self.decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            self.on_sample(sample)

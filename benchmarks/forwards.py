"""Throughput and small requests through a forward of labctl and of `ssh -L`."""

from __future__ import annotations

import hashlib
import http.client
import statistics
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.boxes import Box, Boxes, boxes, docker
from benchmarks.measure import Comparison, NotDoneError, Row
from benchmarks.settings import Settings
from labctl.events import SilentReporter
from labctl.model import Service
from labctl.services.port_forward import Forwarding, ForwardSpec, find_free_port, probe_port

PORT = 9000
BLOCK_BYTES = 1024 * 1024
KEPT_ALIVE, FRESH = 300, 200
THROUGHPUT_TARGET, SMALL_TARGET, TAIL_TARGET = round(1 / 1.1, 3), 1.1, 1.0
READY_S = 10.0
SERVER = """
import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
BLOCK = b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(32768))
class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_GET(self):
        mib = int(self.path.lstrip("/") or 0)
        self.send_response(200)
        self.send_header("Content-Length", str(mib * len(BLOCK)))
        self.end_headers()
        for _ in range(mib):
            self.wfile.write(BLOCK)
    def log_message(self, *_):
        pass
ThreadingHTTPServer(("127.0.0.1", %d), Answer).serve_forever()
""".replace("%d)", f"{PORT})")
BLOCK = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(32768))


@contextmanager
def doors(made: Boxes, box: Box) -> Iterator[dict[str, int]]:
    """Return the local port of each side's forward to one HTTP server, by the side's name."""
    docker("exec", "-d", "-u", "student", box.name, "python3", "-c", SERVER)
    with ExitStack() as stack:
        found = {}
        for name in ("default", "labctl's ciphers"):
            port = find_free_port(0)
            words = (*made.ssh(name), "-N", "-L", f"127.0.0.1:{port}:127.0.0.1:{PORT}", box.name)
            process = stack.enter_context(subprocess.Popen(words))
            stack.callback(process.terminate)
            found[f"ssh -L, {name}"] = port
        server = made.server(box, "forward")
        spec = ForwardSpec(
            config=str(made.connections.write(server)),
            server_id=box.name,
            endpoint=box.endpoint,
            service=Service(name="bench", port=PORT),
            local_port=find_free_port(0),
        )

        def unchanged() -> ForwardSpec:
            return spec

        forwarding = stack.enter_context(Forwarding(spec, SilentReporter(), unchanged))
        found["labctl forward"] = forwarding.local_port
        for name, port in found.items():
            _wait(name, port)
        yield found


def _wait(name: str, port: int) -> None:
    deadline = time.monotonic() + READY_S
    while probe_port(port, "/0") != "answering":
        if time.monotonic() > deadline:
            raise NotDoneError(f"{name} does not answer")
        time.sleep(0.02)


def compare(settings: Settings) -> Generator[Comparison]:
    """Compare forwards to one HTTP server; the baseline is ssh with its defaults."""
    mib, rounds = settings.sizes.forward_mib, settings.sizes.rounds
    kinds: tuple[tuple[str, Callable[[int], Callable[[int], float]], float], ...] = (
        (f"forward, {mib} MiB", lambda port: _Fetch(port, mib), THROUGHPUT_TARGET),
        ("forward, small requests kept alive, p50", _Kept, SMALL_TARGET),
        ("forward, small requests on new connections, p99", _Fresh, TAIL_TARGET),
    )
    with (
        boxes(settings.home / "forward", 1, settings.image) as made,
        doors(made, made.all[0]) as ports,
    ):
        for title, make_work, target in kinds:
            rows = [
                Row(name, make_work(port), target if name == "labctl forward" else None)
                for name, port in ports.items()
            ]
            yield Comparison(title, rows, rounds)


class _Fetch:
    def __init__(self, port: int, mib: int) -> None:
        self.port, self.mib = port, mib

    def __call__(self, number: int) -> float:
        way = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        buffer = memoryview(bytearray(256 * 1024))
        begun = time.perf_counter()
        way.request("GET", f"/{self.mib}")
        reply = way.getresponse()
        count = 0
        whole = hashlib.sha256() if number == 0 else None
        while took := reply.readinto(buffer):
            count += took
            if whole is not None:  # in the warm-up round
                whole.update(buffer[:took])
        spent_s = time.perf_counter() - begun
        way.close()
        if count != self.mib * BLOCK_BYTES:
            raise NotDoneError(f"received only {count} bytes")
        if whole is not None and whole.digest() != hashlib.sha256(BLOCK * self.mib).digest():
            raise NotDoneError("the received bytes differ from those sent")
        return spent_s


def _ask(way: http.client.HTTPConnection) -> float:
    begun = time.perf_counter()
    way.request("GET", "/0")
    reply = way.getresponse()
    reply.read()
    if reply.status != 200:
        raise NotDoneError(f"the response has status {reply.status}")
    return time.perf_counter() - begun


class _Kept:
    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, number: int) -> float:
        way = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        took = [_ask(way) for _ in range(KEPT_ALIVE)]
        way.close()
        return statistics.median(took)


class _Fresh:
    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, number: int) -> float:
        took = []
        for _ in range(FRESH):
            way = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            took.append(_ask(way))
            way.close()
        return statistics.quantiles(took, n=100)[98]

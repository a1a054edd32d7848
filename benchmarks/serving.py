"""A load test of `labctl serve`, with and without batching, compared with a plain Flask handler.

The same trained sample project answers in all of them, in a process of its own; callers send one
PNG after another, each over a connection of its own, which Flask's server closes after every
answer. What is timed is from asking (connecting, where need be) to the last byte read. Server and
callers share this machine.

    python -m benchmarks.serving [--rounds N] [--seconds S] [--small]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measure import NotDoneError

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
CALLERS = (1, 8, 32)
READY_S = 120.0
FLASK = """
import io, sys
from pathlib import Path
from flask import Flask, request
from PIL import Image
import predict

model = predict.load(Path("checkpoints"))
app = Flask(__name__)

@app.post("/predict")
def answer():
    (row,) = model.predict([Image.open(io.BytesIO(request.get_data()))])
    best = max(range(len(row)), key=row.__getitem__)
    told = {"class": model.classes[best], "probability": row[best]}
    return {"predictions": [told]}

import logging
logging.getLogger("werkzeug").setLevel(logging.ERROR)
app.run(port=int(sys.argv[1]), threaded=True)
"""
SERVE = "import sys; from labctl.services.model_server.__main__ import main; sys.exit(main())"


@dataclass
class Side:
    """A way to serve. `seconds` has the latencies, `rates` the responses a second per round."""

    name: str
    program: str
    environ: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        found = sorted(self.seconds)
        return {
            "requests": len(found),
            "p50_ms": statistics.median(found) * 1000,
            "p99_ms": found[min(len(found) - 1, int(len(found) * 0.99))] * 1000,
            "requests_per_s": statistics.median(self.rates),
        }


def sides() -> list[Side]:
    return [
        Side("one plain Flask handler", FLASK),
        Side("labctl serve --batch 1", SERVE, {"LABCTL_SERVE_MAX_BATCH": "1"}),
        Side("labctl serve", SERVE),
    ]


@contextmanager
def project(image_size: int) -> Iterator[Path]:
    """Create the sample project with a checkpoint of one epoch, and its pictures."""
    with tempfile.TemporaryDirectory(prefix="labctl-bench-") as folder:
        home = Path(folder) / "project"
        shutil.copytree(ROOT / "templates" / "image-classifier", home)
        words = ["train.py", "--epochs", "1", "--image-size", str(image_size), "--workers", "0"]
        done = subprocess.run(
            [sys.executable, *words], cwd=home, env=_environ({}), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise NotDoneError(f"train.py ended with {done.returncode}: {done.stderr[-600:]}")
        yield home


def _environ(more: dict[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LABCTL_", "PYTHON"))}
    return {**kept, **more}


@contextmanager
def started(side: Side, home: Path) -> Iterator[int]:
    """Return the port of a server that answers. It may use all processors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environ = _environ({**side.environ, "LABCTL_SERVE_PORT": str(port), "PYTHONPATH": str(ROOT)})
    process = subprocess.Popen(
        [sys.executable, "-c", side.program, str(port)],
        cwd=home,
        env=environ,
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise NotDoneError("the server did not start")


class Caller:
    """A client that sends requests one after another, over a connection that is kept open."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> str:
        """Return the class of one picture. NotDoneError if the reply is not a prediction."""
        if self.link is None:
            self.link = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.link
        head = "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        said = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(said.partition("content-length:")[2].partition("\r\n")[0])
        told = json.loads(await reader.readexactly(length))
        if "connection: close" in said:
            self.close()
        if not said.startswith("http/1.1 200") and not said.startswith("http/1.0 200"):
            raise NotDoneError(f"{said.splitlines()[0]}: {told}")
        (prediction,) = told["predictions"]
        return str(prediction["class"])

    def close(self) -> None:
        if self.link is not None:
            self.link[1].close()
            self.link = None


async def called(port: int, bodies: list[bytes], until: float, first: int) -> list[float]:
    """Send one picture after another until the time is up; return the latency of each."""
    caller, found, number = Caller(port), [], first
    while time.perf_counter() < until:
        begun = time.perf_counter()
        await caller.ask(bodies[number % len(bodies)])
        found.append(time.perf_counter() - begun)
        number += 1
    caller.close()
    return found


async def load(port: int, bodies: list[bytes], callers: int, seconds: float) -> list[float]:
    until = time.perf_counter() + seconds
    each = (called(port, bodies, until, 7 * number) for number in range(callers))
    return [one for found in await asyncio.gather(*each) for one in found]


async def classes(port: int, bodies: list[bytes]) -> list[str]:
    """Return a server's predictions for some pictures; all servers must agree."""
    caller = Caller(port)
    found = [await caller.ask(body) for body in bodies]
    caller.close()
    return found


def measured(image_size: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure a row for each number of callers and each side; the sides take turns."""
    rows = []
    with project(image_size) as home, ExitStack() as running:
        files = sorted((home / "dataset" / "test").rglob("*.png"))
        bodies = [path.read_bytes() for path in files]
        ports = {side.name: running.enter_context(started(side, home)) for side in sides()}
        said = {tuple(asyncio.run(classes(port, bodies[:20]))) for port in ports.values()}
        if len(said) != 1:
            raise NotDoneError(f"the servers disagree: {said}")
        for callers in CALLERS:
            print(f"measuring: {callers} callers, images of {image_size}", file=sys.stderr)
            compared = sides()
            for number in range(rounds + 1):
                for side in compared:
                    # A shorter warm-up round comes before the first.
                    long = seconds if number else 1.0
                    found = asyncio.run(load(ports[side.name], bodies, callers, long))
                    if number:
                        side.seconds += found
                        side.rates.append(len(found) / long)
            about = {"image_size": image_size, "callers": callers}
            rows += [{**about, "name": side.name, **side.figures()} for side in compared]
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| image | callers | | p50 ms | p99 ms | requests/s |", "|---|---|---|---|---|---|"]
    for row in rows:
        figures = f"{row['p50_ms']:.1f} | {row['p99_ms']:.1f} | {row['requests_per_s']:.0f}"
        lines.append(f"| {row['image_size']} | {row['callers']} | {row['name']} | {figures} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of one measurement")
    parser.add_argument(
        "--small", action="store_true", help="use small sizes, to see that it works"
    )
    options = parser.parse_args()
    if options.small:
        options.rounds, options.seconds = 1, 1.0
    sizes = (16,) if options.small else (16, 96)
    told: dict[str, Any] = {
        "version": 1,
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "group": "serving",
        "cpus": os.cpu_count(),
        "load": [round(one, 1) for one in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {one: version(one) for one in ("torch", "fastapi", "uvicorn", "flask")},
        "rounds": options.rounds,
        "seconds": options.seconds,
        "rows": [],
    }
    for image_size in sizes:
        told["rows"] += measured(image_size, options.rounds, options.seconds)
    print(_table(told["rows"]))
    if not options.small:
        path = RESULTS / f"{told['at'][:19].replace(':', '')}-serving.json"
        path.write_text(json.dumps(told, indent=1) + "\n")
        print(f"\nwritten to {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Students' services through the keeper's proxy, compared with `ssh -L` to the same server.

    python -m benchmarks.student_services [--notebooks N] [--mib M] [--rounds R] [--mb-per-s L]

N clients download M MiB each at the same time, from one HTTP server behind sshd in a container:
over a forward of ssh, and as a signed-in student over the proxy, which runs in a process of its own
and uses such a forward, too. All of them share the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.boxes import MADE_HERE, Box, Boxes, boxes, docker
from benchmarks.course_pages import ROOT, report
from benchmarks.forwards import BLOCK_BYTES, PORT, SERVER
from benchmarks.slow_link import slow_link
from labctl.services.port_forward import find_free_port, probe_port

TARGET = 0.8
READY_S = 20.0
SERVE = """
import json, sys
from pathlib import Path
import msgspec
sys.path[:0] = [sys.argv[1] + "/tests/flow"]
from service_proxy_bed import serve_campus
from labctl.services.socket_forward import SocketForward, SocketForwardSpec
spec = msgspec.json.decode(sys.argv[3], type=SocketForwardSpec)
with serve_campus(Path(sys.argv[2]), lambda key: SocketForward(spec)) as campus:
    visitor = campus.open("lovelace")
    print(json.dumps([visitor.host, visitor.cookie]), flush=True)
    sys.stdin.read()
"""


def download(host: str, headers: dict[str, str], mib: int) -> None:
    """Download MIB, which must arrive complete."""
    connection = HTTPConnection(host, timeout=300)
    buffer = memoryview(bytearray(256 * 1024))
    connection.request("GET", f"/{mib}", headers=headers)
    answer = connection.getresponse()
    received = 0
    while count := answer.readinto(buffer):
        received += count
    connection.close()
    assert (answer.status, received) == (200, mib * BLOCK_BYTES)


def measure(clients: int, work: Callable[[], None]) -> float:
    """Return the seconds that this many clients take together."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - begun


def compare(made: Boxes, box: Box, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    docker("exec", "-d", "-u", "student", box.name, "python3", "-c", SERVER)
    server = made.server(box, "forward")
    config = str(made.connections.write(server))
    port = find_free_port(0)
    words = (*made.ssh("labctl's ciphers"), "-N", "-L", f"127.0.0.1:{port}:127.0.0.1:{PORT}")
    spec = {
        "config": config, "server_id": box.name, "path": str(folder / "service"),
        "endpoint": {"host": box.endpoint.host, "port": box.endpoint.port},
        "service": {"name": "jupyter", "port": PORT, "path": "/0"},
    }  # fmt: skip
    direct = subprocess.Popen((*words, box.name))
    served = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(ROOT), str(folder), json.dumps(spec)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + READY_S
        while probe_port(port, "/0") != "answering":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert served.stdout is not None
        host, cookie = json.loads(served.stdout.readline())
        kinds = {
            "direct": lambda: download(f"127.0.0.1:{port}", {}, given.mib),
            "proxied": lambda: download(host, {"Cookie": cookie}, given.mib),
        }
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(given.rounds + 1):  # the first round warms up
            for name, work in kinds.items():
                times[name].append(measure(given.notebooks, work))
        total = given.notebooks * given.mib
        return {
            name: round(total / statistics.median(taken[1:]), 1) for name, taken in times.items()
        }
    finally:
        for process in (direct, served):
            process.terminate()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notebooks", type=int, default=50)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb-per-s", type=float, default=0.0, help="limit of the server's link")
    given = parser.parse_args()
    image = os.environ.get("LABCTL_BASE_IMAGE", MADE_HERE)
    with (
        tempfile.TemporaryDirectory(prefix="labctl-services-", dir="/tmp") as name,
        boxes(Path(name) / "home", 1, image) as made,
    ):
        if given.mb_per_s:
            with slow_link(made, made.all[0], given.mb_per_s * 1e6) as (behind, box):
                speeds = compare(behind, box, Path(name), given)
        else:
            speeds = compare(made, made.all[0], Path(name), given)
    share = round(speeds["proxied"] / speeds["direct"], 3)
    figures: dict[str, Any] = {
        "notebooks": given.notebooks,
        "mib_each": given.mib,
        "link_mb_per_s": given.mb_per_s or None,
        "mib_per_s": speeds,
        "share_of_direct": share,
    }
    return report("student_services", figures, {f"{TARGET:g} of ssh -L": share >= TARGET})


if __name__ == "__main__":
    sys.exit(main())

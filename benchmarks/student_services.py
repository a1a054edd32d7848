"""Students' services through the keeper's proxy, compared with `ssh -L` to the same server.

    python -m benchmarks.student_services [--notebooks N] [--mib M] [--rounds R] [--mb-per-s L]
        [--jupyter DIR]

N clients download M MiB each at the same time, from one HTTP server behind sshd in a container:
over a forward of ssh, and as a signed-in student over the proxy, which runs in a process of its own
and uses such a forward, too. They do so by plain downloads, and as messages of 64 KiB and of 1 MiB
over WebSockets. All of them share the cores of this machine. Each round has a ratio of its own.

With --jupyter, the server is a real Jupyter server with a kernel for each client: they download a
file, and run cells that print M MiB. DIR has its packages: `pip install --target DIR jupyter_server
ipykernel`, with the Python version of the server (3.11).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks import real_jupyter
from benchmarks.boxes import MADE_HERE, Box, Boxes, boxes, docker
from benchmarks.course_pages import ROOT, report
from benchmarks.forwards import BLOCK_BYTES, PORT, SERVER
from benchmarks.slow_link import slow_link
from labctl.services.port_forward import find_free_port, probe_port

TARGET = 0.8
KIB = 1024
# the bytes of a message over a WebSocket
MESSAGES = {"messages of 64 KiB": 64 * KIB, "messages of 1 MiB": 1024 * KIB}
CLOSE = b"\x88\x02\x03\xe8"
READY_S = 60.0
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


# Answers `GET /SIZExCOUNT` with so many binary messages over a WebSocket (RFC 6455), and a close.
MESSAGE_SERVER = (
    SERVER.partition("ThreadingHTTPServer((")[0]
    + """
import base64, struct
class Messages(Answer):
    def do_GET(self):
        if "upgrade" not in self.headers:
            return super().do_GET()
        key = self.headers["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1(key).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        size, count = map(int, self.path.lstrip("/").split("x"))
        frame = struct.pack(">BBQ", 0x82, 127, size) + BLOCK[:size]
        for _ in range(count):
            self.wfile.write(frame)
        self.wfile.write(b"\\x88\\x02\\x03\\xe8")
        self.rfile.read(1)
        self.close_connection = True
"""
    + f'ThreadingHTTPServer(("127.0.0.1", {PORT}), Messages).serve_forever()\n'
)


def receive_messages(host: str, headers: dict[str, str], mib: int, size: int) -> None:
    """Receive MIB in messages of SIZE bytes over a WebSocket; all of them must arrive."""
    name, _, port = host.partition(":")
    total = mib * BLOCK_BYTES
    lines = {
        "Host": host, "Upgrade": "websocket", "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13", "Origin": f"http://{host}",
        "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(), **headers,
    }  # fmt: skip
    request = [f"GET /{size}x{total // size} HTTP/1.1", *(f"{k}: {v}" for k, v in lines.items())]
    buffer, received, end = memoryview(bytearray(256 * KIB)), 0, b""
    with socket.create_connection((name, int(port)), timeout=300) as connection:
        connection.sendall("\r\n".join([*request, "", ""]).encode())
        while end != CLOSE and (count := connection.recv_into(buffer)):
            assert received or bytes(buffer[:12]) == b"HTTP/1.1 101", bytes(buffer[:count])
            received += count
            end = (end + bytes(buffer[max(0, count - 4) : count]))[-4:]
    assert end == CLOSE
    assert received > total


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


def compare_sides(
    work: Callable[[str, dict[str, str]], None],
    sides: dict[str, tuple[str, dict[str, str]]],
    given: argparse.Namespace,
) -> dict[str, Any]:
    """Measure both sides in turn, and the share of each round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(given.rounds + 1):  # the first round warms up
        for name in list(sides)[:: 1 if number % 2 else -1]:
            times[name].append(measure(given.notebooks, partial(work, *sides[name])))
    total = given.notebooks * given.mib
    rounds = list(zip(times["direct"][1:], times["proxied"][1:], strict=True))
    shares = [round(direct / proxied, 3) for direct, proxied in rounds]
    speeds = {name: round(total / statistics.median(taken[1:]), 1) for name, taken in times.items()}
    return {"mib_per_s": speeds, "shares": shares, "median": statistics.median(shares)}


def list_work(
    direct: str, given: argparse.Namespace
) -> dict[str, Callable[[str, dict[str, str]], None]]:
    """List what each client does, by its name."""
    if given.jupyter:
        kernels = real_jupyter.Kernels(direct, given.notebooks)
        return {
            "downloads from Jupyter": partial(real_jupyter.download_file, mib=given.mib),
            "output of Jupyter's kernels": partial(kernels.print_output, mib=given.mib),
        }
    messages = {
        name: partial(receive_messages, mib=given.mib, size=size) for name, size in MESSAGES.items()
    }
    return {"downloads": partial(download, mib=given.mib), **messages}


def compare(made: Boxes, box: Box, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    probe_path = "/api" if given.jupyter else "/0"
    if given.jupyter:
        real_jupyter.start_jupyter(box, given.jupyter, given.mib)
    else:
        docker("exec", "-d", "-u", "student", box.name, "python3", "-c", MESSAGE_SERVER)
    server = made.server(box, "forward")
    config = str(made.connections.write(server))
    port = find_free_port(0)
    words = (*made.ssh("labctl's ciphers"), "-N", "-L", f"127.0.0.1:{port}:127.0.0.1:{PORT}")
    spec = {
        "config": config, "server_id": box.name, "path": str(folder / "service"),
        "endpoint": {"host": box.endpoint.host, "port": box.endpoint.port},
        "service": {"name": "jupyter", "port": PORT, "path": probe_path},
    }  # fmt: skip
    direct = subprocess.Popen((*words, box.name))
    served = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(ROOT), str(folder), json.dumps(spec)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + READY_S
        while probe_port(port, probe_path) != "answering":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert served.stdout is not None
        host, cookie = json.loads(served.stdout.readline())
        sides: dict[str, tuple[str, dict[str, str]]] = {
            "direct": (f"127.0.0.1:{port}", {}),
            "proxied": (host, {"Cookie": cookie}),
        }
        work = list_work(sides["direct"][0], given)
        return {name: compare_sides(one, sides, given) for name, one in work.items()}
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
    parser.add_argument("--jupyter", type=Path, help="packages of a real Jupyter server")
    given = parser.parse_args()
    image = os.environ.get("LABCTL_BASE_IMAGE", MADE_HERE)
    with (
        tempfile.TemporaryDirectory(prefix="labctl-services-", dir="/tmp") as name,
        boxes(Path(name) / "home", 1, image) as made,
    ):
        if given.mb_per_s:
            with slow_link(made, made.all[0], given.mb_per_s * 1e6) as (behind, box):
                results = compare(behind, box, Path(name), given)
        else:
            results = compare(made, made.all[0], Path(name), given)
    figures: dict[str, Any] = {
        "notebooks": given.notebooks,
        "mib_each": given.mib,
        "link_mb_per_s": given.mb_per_s or None,
        "of_direct": results,
    }
    targets = {
        f"{name}: {TARGET:g} of ssh -L in every round": min(result["shares"]) >= TARGET
        for name, result in results.items()
    }
    name = "student_services_jupyter" if given.jupyter else "student_services"
    return report(name, figures, targets)


if __name__ == "__main__":
    sys.exit(main())

"""A real Jupyter server on a benchmark's server: downloads of a file, and the output of kernels.

Its packages come from a directory that `pip install --target` made, since servers have no network.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from benchmarks.boxes import Box, docker
from benchmarks.forwards import BLOCK_BYTES, PORT, READY_S

PLACE = "/opt/jupyter"
START_S = 120.0
CHUNK_BYTES = 64 * 1024
Work = Callable[[str, dict[str, str]], None]
SERVE = (
    f"cd ~ && mkdir -p files && head -c {{size}} /dev/urandom > files/data.bin && cd files && "
    f"PYTHONPATH={PLACE} JUPYTER_PATH={PLACE}/share/jupyter exec python3 -m jupyter_server "
    f"--ip=127.0.0.1 --port={PORT} --no-browser --IdentityProvider.token= "
    "--ServerApp.disable_check_xsrf=True --ServerApp.allow_remote_access=True "
    # otherwise Jupyter itself holds back an output of more than 1 MB/s
    "--ZMQChannelsWebsocketConnection.limit_rate=False --log-level=ERROR > ../jupyter.log 2>&1"
)


def start_jupyter(box: Box, packages: Path, mib: int) -> None:
    """Start the server, with a file of MIB."""
    docker("cp", f"{packages}/.", f"{box.name}:{PLACE}")
    line = SERVE.format(size=mib * BLOCK_BYTES)
    docker("exec", "-d", "-u", "student", "-e", "HOME=/home/student", box.name, "sh", "-c", line)


def download_file(host: str, headers: dict[str, str], mib: int) -> None:
    """Download the file, as JupyterLab does; it must arrive complete."""
    connection = HTTPConnection(host, timeout=300)
    connection.request("GET", "/files/data.bin?download=1", headers=headers)
    answer = connection.getresponse()
    received = sum(iter(lambda: len(answer.read(256 * 1024)), 0))
    connection.close()
    assert (answer.status, received) == (200, mib * BLOCK_BYTES), (answer.status, received)


class Kernels:
    """A kernel for each client, which a notebook would have. A client takes one at a time."""

    def __init__(self, host: str, count: int) -> None:
        self._free = [_start_kernel(host) for _ in range(count)]

    def print_output(self, host: str, headers: dict[str, str], mib: int) -> None:
        """Run a cell that prints MIB, and receive its output to the end."""
        kernel = self._free.pop()
        try:
            uri = f"ws://{host}/api/kernels/{kernel}/channels"
            with connect(
                uri,
                origin=Origin(f"http://{host}"),
                additional_headers=headers,
                max_size=None,
                compression=None,
                open_timeout=START_S,
            ) as socket:
                lines = mib * BLOCK_BYTES // CHUNK_BYTES
                received = _run_cell(socket, f'for _ in range({lines}): print("x" * {CHUNK_BYTES})')
            assert received == lines * (CHUNK_BYTES + 1), received
        finally:
            self._free.append(kernel)


def _start_kernel(host: str) -> str:
    """Start a kernel, and return its id once it has run a cell."""
    connection = HTTPConnection(host, timeout=START_S)
    connection.request("POST", "/api/kernels", "{}", {"Content-Type": "application/json"})
    answer = connection.getresponse()
    kernel = str(json.loads(answer.read())["id"])
    connection.close()
    uri = f"ws://{host}/api/kernels/{kernel}/channels"
    with connect(uri, compression=None, open_timeout=START_S) as socket:
        _run_cell(socket, "1")
    return kernel


def _run_cell(socket: ClientConnection, code: str) -> int:
    """Run code in the kernel; return the length of what it printed."""
    own = uuid.uuid4().hex
    header = {"msg_id": own, "username": "", "session": own, "msg_type": "execute_request"}
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
    request = {
        "header": {**header, "version": "5.3"}, "parent_header": {}, "metadata": {},
        "content": content, "channel": "shell", "buffers": [],
    }  # fmt: skip
    socket.send(json.dumps(request))
    received, deadline = 0, time.monotonic() + START_S + READY_S
    while time.monotonic() < deadline:
        message: dict[str, Any] = json.loads(socket.recv(timeout=START_S))
        if message.get("parent_header", {}).get("msg_id") != own:
            continue
        if message["msg_type"] == "stream":
            received += len(message["content"]["text"])
        elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return received
    raise TimeoutError("the cell did not end")

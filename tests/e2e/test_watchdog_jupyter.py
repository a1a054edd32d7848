"""A forgotten Jupyter does not keep a server; a busy kernel does, whoever looks at it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from service_lab import HOME, LAB, LAB_ID, ServiceLab
from sshd_container import wait_for

from labctl.model import Service
from labctl.wire.watchdog import (
    GUARD,
    WATCH,
    EndingRecord,
    GuardLimits,
    GuardRequest,
    WatchRecord,
    WatchRequest,
)

pytest_plugins = ["service_fixtures"]
pytestmark = pytest.mark.engine

# What a browser does that runs a cell and is closed then: a websocket, one masked frame.
EXECUTE = """
import base64, json, os, socket, struct, sys
port, token, kernel, code = sys.argv[1:]
link = socket.create_connection(("127.0.0.1", int(port)))
lines = [f"GET /api/kernels/{kernel}/channels HTTP/1.1", f"Host: localhost:{port}",
    "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: " + base64.b64encode(os.urandom(16)).decode(),
    f"Authorization: token {token}"]
link.sendall("\\r\\n".join([*lines, "", ""]).encode())
assert b" 101 " in link.recv(4096)
header = {"msg_id": "1", "username": "", "session": "1", "msg_type": "execute_request",
    "version": "5.3"}
message = {"header": header, "parent_header": {}, "metadata": {}, "channel": "shell",
    "content": {"code": code, "silent": False}, "buffers": []}
body = json.dumps(message).encode()
link.sendall(struct.pack("!BBH4x", 0x81, 0x80 | 126, len(body)) + body)
while b"busy" not in link.recv(65536): pass
"""


def request(lab: ServiceLab, service: Service, method: str, path: str) -> str:
    program = (
        "import sys,http.client as h;p,m,u,t=sys.argv[1:];c=h.HTTPConnection('127.0.0.1',int(p));"
        "c.request(m,u,headers={'Authorization':'token '+t});print(c.getresponse().read().decode())"
    )
    words = f"{service.port} {method} {path} {service.token}"
    return lab.box.sh(f'echo "{program}" | python3 - {words}')


@pytest.mark.long
def test_kernels_count_and_the_server_alone_does_not(service_lab: ServiceLab) -> None:
    service = service_lab.ensure("jupyter")
    limits = GuardLimits(ttl_s=3600, idle_s=20)
    ending = EndingRecord("poweroff")
    armed = GuardRequest(LAB, LAB_ID, "jupyter", limits=limits, ending=ending)
    remote = service_lab.remote
    remote.call(GUARD, armed)

    def watch() -> WatchRecord:
        report = remote.call(WATCH, WatchRequest(LAB_ID)).watch
        assert report
        return report

    def told(sentence: str) -> Callable[[], bool]:
        return lambda: any(sentence in each for each in watch().busy)

    kernel = json.loads(request(service_lab, service, "POST", "/api/kernels"))["id"]
    wait_for(told("a Jupyter kernel was used, "))
    words = f"{service.port} {service.token} {kernel} 'import time; time.sleep(600)'"
    service_lab.box.sh(f"python3 - {words} <<'END'\n{EXECUTE}END")
    wait_for(told("a Jupyter kernel is busy"))
    request(service_lab, service, "POST", f"/api/kernels/{kernel}/interrupt")
    wait_for(told("a Jupyter kernel was used, "))
    wait_for(lambda: watch().idle_for_s > 4)
    assert service_lab.inspect(service.container)["State"]["Running"]
    token = f"{HOME}/{LAB}/.labctl/service-jupyter.token"
    service_lab.box.sh(f"mv {token} {token}.kept")
    wait_for(told("Jupyter's kernels cannot be read, which counts as work (HTTP 403)"))
    service_lab.box.sh(f"mv {token}.kept {token}")
    remote.call(GUARD, armed._replace(limits=GuardLimits(ttl_s=3600)))

"""The page for students behind nginx and Caddy, configured as docs/dashboard.md says."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import websockets
from service_proxy_bed import CODE, LAB_ID, Campus, run_service, serve_campus
from test_student_page_tls import choose_ports, write_certificate
from websockets.sync.client import connect

from labctl.services.remote_terminal import RemoteTerminal
from labctl.web import factory
from labctl.web.http_server import StudentSettings

DOCS = Path(__file__).parents[2] / "docs" / "dashboard.md"
PAGE, SERVICES = "labs.example.edu", "labs-services.example.edu"


def read_config(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found
    return found[1]


def run_nginx(folder: Path, port: int, ports: tuple[int, int]) -> list[str]:
    cert, key = write_certificate(folder, (PAGE, SERVICES))
    text = read_config("nginx").replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    text = text.replace("/etc/ssl/labs/fullchain.pem", str(cert))
    text = text.replace("/etc/ssl/labs/privkey.pem", str(key))
    text = text.replace("8610", str(ports[0])).replace("8611", str(ports[1]))
    paths = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\n"
        f"http {{ access_log off;\n{paths}{text} }}\n"
    )
    return ["nginx", "-c", str(file), "-e", str(folder / "error.log")]


def run_caddy(folder: Path, port: int, ports: tuple[int, int]) -> list[str]:
    cert, key = write_certificate(folder, (PAGE, SERVICES))
    text = read_config("caddy").replace("8610", str(ports[0])).replace("8611", str(ports[1]))
    # A certificate authority is out of reach here, and so is port 443.
    text = re.sub(r"^(labs\S*) \{", rf"https://\1:{port} {{\n  tls {cert} {key}", text, flags=re.M)
    file = folder / "Caddyfile"
    file.write_text(f"{{\n  admin off\n  auto_https disable_redirects\n}}\n{text}")
    return ["caddy", "run", "--config", str(file), "--adapter", "caddyfile"]


@dataclass
class Front:
    """A proxy on a port; it passes on what browsers send to the two host names at port 443."""

    campus: Campus
    port: int
    trust: ssl.SSLContext

    def dial(self, host: str) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return self.trust.wrap_socket(plain, server_hostname=host)

    def ask(
        self, host: str, path: str, method: str = "GET", body: str = "", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, str]:
        connection = http.client.HTTPConnection(host)
        connection.sock = self.dial(host)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body or None, {"Host": host, **sent})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()
        finally:
            connection.close()


@pytest.fixture(params=["nginx", "caddy"])
def front(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Front]:
    monkeypatch.setattr(
        factory, "open_seat_terminal", lambda course, key, *size: RemoteTerminal(("cat",), *size)
    )
    runs: dict[str, Callable[[Path, int, tuple[int, int]], list[str]]] = {
        "nginx": run_nginx,
        "caddy": run_caddy,
    }
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed: sudo apt install {request.param}")
    ports, (port, _) = choose_ports(), choose_ports()
    settings = StudentSettings(
        port=ports[0],
        url=f"https://{PAGE}",
        services_port=ports[1],
        services_url=f"https://{SERVICES}",
    )
    words = runs[request.param](tmp_path, port, ports)
    with run_service() as forward, serve_campus(tmp_path, lambda key: forward, settings) as campus:
        process = subprocess.Popen(
            words,
            env={"PATH": "/usr/sbin:/usr/bin:/bin", "HOME": str(tmp_path)},
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until_open(port)
            trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
            yield Front(campus, port, trust)
        finally:
            process.terminate()
            process.wait()


def wait_until_open(port: int) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_student_signs_in_follows_the_page_and_opens_a_notebook(front: Front) -> None:
    front.campus.invite("lovelace")
    form = urllib.parse.urlencode({"csrf": "", "student": "lovelace", "code": CODE})
    kind = {"Content_Type": "application/x-www-form-urlencoded"}
    assert (
        front.ask(PAGE, "/sign-in", "POST", form, Origin="https://evil.example", **kind)[0] == 403
    )
    status, headers, _ = front.ask(PAGE, "/sign-in", "POST", form, Origin=f"https://{PAGE}", **kind)
    assert status == 303
    cookie = headers["set-cookie"].partition(";")[0]
    assert cookie.startswith("__Host-")
    page = front.ask(PAGE, "/", Cookie=cookie)[2]
    assert "Ada Lovelace" in page
    # The stream of events is not held back.
    stream = page.partition(' sse-connect="')[2].partition('"')[0]
    dialed = front.dial(PAGE)
    request = f"GET {stream} HTTP/1.1\r\nHost: {PAGE}\r\nCookie: {cookie}\r\n\r\n"
    dialed.sendall(request.encode())
    received = b""
    while b"retry: 2000" not in received:
        received += dialed.recv(65_536)
    dialed.close()

    path = f"/services/{LAB_ID}/jupyter"
    status, headers, _ = front.ask(PAGE, path, Cookie=cookie)
    while "location" not in headers:
        status, headers, _ = front.ask(PAGE, path, Cookie=cookie)
    address = headers["location"].removeprefix(f"https://{SERVICES}")
    assert address.startswith("/labctl-open?")
    assert "Open Jupyter of lovelace?" in front.ask(SERVICES, address)[2]
    status, headers, _ = front.ask(SERVICES, address, "POST", Origin=f"https://{SERVICES}")
    own = headers["set-cookie"].partition(";")[0]
    assert (status, headers["location"]) == (303, "/lab")
    request_headers = dict(json.loads(front.ask(SERVICES, "/lab", Cookie=own)[2])["headers"])
    assert request_headers["host"] == "127.0.0.1:8888"
    assert "cookie" not in request_headers
    assert front.ask(SERVICES, "/lab", Cookie=cookie)[0] == 403
    with connect(
        f"wss://{PAGE}/terminal/{LAB_ID}/socket",
        sock=socket.create_connection(("127.0.0.1", front.port)),
        ssl=front.trust,
        server_hostname=PAGE,
        origin=websockets.Origin(f"https://{PAGE}"),
        additional_headers={"Cookie": cookie},
    ) as terminal:
        terminal.send(json.dumps({"typed": "hello"}))
        assert terminal.recv(30) == b"hello"
    with connect(
        f"wss://{SERVICES}/api/kernels/1/channels",
        sock=socket.create_connection(("127.0.0.1", front.port)),
        ssl=front.trust,
        server_hostname=SERVICES,
        origin=websockets.Origin(f"https://{SERVICES}"),
        additional_headers={"Cookie": own},
    ) as channel:
        channel.recv()
        channel.send("hello")
        assert channel.recv() == "hello"


def test_the_addresses_of_browsers_are_told_apart(front: Front) -> None:
    """Ten wrong codes from here close the sign-in for this address, not for a forged one."""
    front.campus.invite("lovelace")
    kind = {"Content_Type": "application/x-www-form-urlencoded", "Origin": f"https://{PAGE}"}
    for number in range(10):
        form = urllib.parse.urlencode({"csrf": "", "student": "lovelace", "code": f"{number:032}"})
        # What a browser claims of its own address is not believed.
        forged = {"X_Forwarded_For": f"192.0.2.{number}"}
        assert front.ask(PAGE, "/sign-in", "POST", form, **kind, **forged)[0] == 403
    form = urllib.parse.urlencode({"csrf": "", "student": "lovelace", "code": CODE})
    status, _, page = front.ask(PAGE, "/sign-in", "POST", form, **kind)
    assert (status, "too many failed attempts" in page) == (403, True)

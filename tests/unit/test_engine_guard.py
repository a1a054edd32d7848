"""What stands before an engine: local programs reach it, web pages of other sites do not."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from labctl.retry import poll_until
from labctl.services.language_models import guard_program
from labctl.services.port_forward import find_free_port

# Answers in two parts, of which the second one waits for a file, and ends as it is asked to. As the
# engines do, it announces that it closes the connection.
ENGINE = """
import http.server, pathlib, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/exit":
            sys.stdout.flush(); import os; os._exit(7)
        body = f"{self.path} {self.headers['Host']} {self.headers['Connection']}".encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
        self.wfile.write(b"5\\r\\nfirst\\r\\n")
        while not pathlib.Path(sys.argv[2]).exists():
            time.sleep(0.01)
        self.wfile.write(f"{len(body):x}\\r\\n".encode() + body + b"\\r\\n0\\r\\n\\r\\n")
    def end_headers(self):
        self.send_header("Connection", self.headers["Connection"])
        super().end_headers()
    def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""  # noqa: E501


class Guarded:
    """An engine behind the guard, as the service's container starts them."""

    def __init__(self, directory: Path) -> None:
        self.port, self.end = find_free_port(0), directory / "end"
        own = str(find_free_port(0))
        program = Path(guard_program.__file__).read_text()
        engine = (sys.executable, "-c", ENGINE, own, str(self.end))
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(self.port), own, *engine]
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.session = requests.Session()

    def get(self, path: str = "/", **headers: str) -> requests.Response:
        return self.session.get(self.url + path, headers=headers, timeout=60)

    def answers(self) -> bool:
        try:
            return self.get().status_code == 200  # 503 while the engine starts
        except requests.ConnectionError:
            return False


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path)
    try:
        assert poll_until(guarded.answers, pause_s=0.05, deadline_s=60)
        yield guarded
    finally:
        guarded.session.close()
        guarded.process.terminate()
        guarded.process.wait()


def test_local_programs_and_pages_are_served(guarded: Guarded) -> None:
    own = f"127.0.0.1:{guarded.port}"
    assert guarded.get("/v1/models").text == f"/v1/models {own} close"
    # Another port of this machine may be forwarded to the engine's.
    assert guarded.get(Host="localhost:9999").status_code == 200
    assert guarded.get(Origin=f"http://{own}").status_code == 200
    assert guarded.get(Origin="http://localhost:3000").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Host": "localhost.evil.example"},
        {"Host": ""},
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost.evil.example"},
        {"Origin": "http://localhost@evil.example"},
        {"Origin": "null"},
    ],
)
def test_foreign_pages_are_refused(guarded: Guarded, headers: dict[str, str]) -> None:
    reply = guarded.get(**headers)
    assert reply.status_code == 400
    assert "127.0.0.1 nor localhost" in reply.text or "another site" in reply.text


def test_each_request_of_a_connection_is_checked(guarded: Guarded) -> None:
    """The engine closes the connection, so that a second request needs a new one."""
    two = "GET /one HTTP/1.1\r\nHost: localhost\r\n\r\nGET /two HTTP/1.1\r\nHost: evil\r\n\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=60) as connection:
        connection.sendall(two.encode())
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
    assert b"/one" in reply
    assert b"/two" not in reply


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : evil\r\nHost: localhost\r\n\r\n",
        "GET / HTTP/1.1\r\nX: y\n Host: evil\nHost: localhost\nHost: evil\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_ambiguous_headers_are_refused(guarded: Guarded, head: str) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=60) as connection:
        connection.sendall(head.encode())
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 400 ")


def test_an_answer_is_passed_on_as_it_is_generated(guarded: Guarded) -> None:
    body = b"x" * 300_000
    with guarded.session.post(guarded.url, data=body, stream=True, timeout=60) as reply:
        parts = reply.iter_content(None)
        assert next(parts) == b"first"
        guarded.end.touch()
        assert b"".join(parts) == body


def test_the_engines_end_is_that_of_the_service(guarded: Guarded) -> None:
    with pytest.raises(requests.ConnectionError):
        guarded.get("/exit")
    assert guarded.process.wait(60) == 7


def test_a_signal_ends_the_engine(guarded: Guarded) -> None:
    guarded.process.send_signal(signal.SIGTERM)
    assert guarded.process.wait(60) == 128 + signal.SIGTERM

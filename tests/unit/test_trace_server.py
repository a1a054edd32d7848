"""The server of profiles' pages: these files, to those who call it localhost, and nothing else."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from labctl.insight.profiler.trace_server import ProfileRequestHandler


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    profile = tmp_path / "runs" / "night" / "logs" / "profile"
    profile.mkdir(parents=True)
    (profile / "index.html").write_text("<p>a profile</p>")
    (profile / "trace.json.gz").write_bytes(b"\x1f\x8b")
    (profile.parent / "run.log").write_text("private")
    (tmp_path / "secret").write_text("private")
    (profile / "profile.json").symlink_to(tmp_path / "secret")
    linked = tmp_path / "runs" / "linked" / "logs"
    linked.mkdir(parents=True)
    (linked / "profile").symlink_to(profile)

    class Here(ProfileRequestHandler):
        runs = tmp_path / "runs"

    server = ThreadingHTTPServer(("127.0.0.1", 0), Here)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def got(port: int, path: str, host: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.putrequest("GET", path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_profile_and_its_trace_are_shown(port: int) -> None:
    assert got(port, "/night/") == (200, b"<p>a profile</p>")
    assert got(port, "/night/index.html?again=1")[0] == 200
    assert got(port, "/night/trace.json.gz") == (200, b"\x1f\x8b")
    status, page = got(port, "/")
    assert status == 200
    assert b'href="/night/"' in page


@pytest.mark.parametrize(
    "path",
    [
        "/night",
        "/night/run.log",
        "/night/../night/logs/run.log",
        "/../secret",
        "/night/..%2f..%2fsecret",
        "/night/profile.json",  # a link out of the run
        "/linked/index.html",
        "/none/index.html",
        "/NIGHT/index.html",
        "/night/index.html/",
    ],
)
def test_nothing_else_is(port: int, path: str) -> None:
    status, body = got(port, path)
    assert status == 404
    assert b"private" not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "10.0.0.1", "localhost:x"]
)
def test_and_nobody_who_calls_it_otherwise(port: int, host: str) -> None:
    assert got(port, "/night/", host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:8765", "127.0.0.1"])
def test_it_is_called_localhost(port: int, host: str) -> None:
    assert got(port, "/night/", host)[0] == 200

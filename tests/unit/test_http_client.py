"""HTTP requests: what they send, how much they read, and which errors they raise."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from labctl.courses.invitation import MOST_BYTES
from labctl.courses.join import fetch_join_file
from labctl.errors import ConnectError, NotFoundError, PolicyError
from labctl.http_client import describe_failure, is_confidential, open_session, read_body


class Site:
    """A web site with one page, which may have no end; `redirects` are addresses by path."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"page"
        self.headers: dict[str, str] = {}
        self.redirects: dict[str, str] = {}
        self.requests: list[dict[str, str]] = []
        self.is_endless = False
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.requests.append({"path": self.path, **dict(self.headers.items())})
                if address := site.redirects.get(self.path):
                    self.send_response(302)
                    self.send_header("Location", address)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(site.status)
                for name, value in site.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    self.wfile.write(site.body)
                    while site.is_endless:
                        self.wfile.write(bytes(65536))
                except OSError:
                    site.is_endless = False

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    site = Site()
    thread = threading.Thread(target=site.server.serve_forever, args=(0.02,))
    thread.start()
    yield site
    site.server.shutdown()
    site.server.server_close()
    thread.join()


def test_no_stored_password_is_sent(site: Site, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login student password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    with open_session() as session:
        assert session.get(site.url).text == "page"
    assert "Authorization" not in site.requests[0]
    assert site.requests[0]["User-Agent"] == "labctl"


@pytest.mark.parametrize(("most_bytes", "expected"), [(4, b"page"), (3, b"pag"), (99, b"page")])
def test_a_body_is_read_up_to_its_limit(site: Site, most_bytes: int, expected: bytes) -> None:
    with open_session() as session, session.get(site.url, stream=True) as response:
        assert read_body(response, most_bytes) == expected


def test_the_limit_holds_for_what_a_compressed_body_becomes(site: Site) -> None:
    site.body, site.headers = gzip.compress(bytes(10_000_000)), {"Content-Encoding": "gzip"}
    with open_session() as session, session.get(site.url, stream=True) as response:
        assert read_body(response, 50_000) == bytes(50_000)


def test_an_endless_join_file_is_left_after_its_most_bytes(site: Site) -> None:
    site.is_endless = True
    assert len(fetch_join_file(f"{site.url}/a.join")) == MOST_BYTES + 1


def test_a_join_file_is_fetched(site: Site) -> None:
    assert fetch_join_file(f"{site.url}/a.join") == b"page"
    assert site.requests[0]["path"] == "/a.join"


def test_a_missing_join_file_is_not_found(site: Site) -> None:
    site.status = 404
    with pytest.raises(NotFoundError, match="no join file") as caught:
        fetch_join_file(f"{site.url}/a.join")
    assert "404 Not Found" in caught.value.why


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://site.example/x", True),
        ("http://127.0.0.1:8080/x", True),
        ("http://localhost", True),
        ("http://[::1]:80/", True),
        ("http://site.example/x", False),
        ("http://127.0.0.1.site.example/x", False),
        ("http://localhost.site.example", False),
        ("http://127.0.0.1@site.example/", False),
    ],
)
def test_only_this_machine_may_be_sent_secrets_without_https(url: str, expected: bool) -> None:
    assert is_confidential(url) == expected


def test_a_join_file_does_not_come_from_an_address_without_https(site: Site) -> None:
    """The other address leads to this machine, too, but not by a name that is known to."""
    site.redirects["/a.join"] = f"http://127.1:{site.server.server_port}/b.join"
    with pytest.raises(PolicyError, match="redirects to an address without https"):
        fetch_join_file(f"{site.url}/a.join")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a.join", "https://127.0.0.1:9/a.join"])
def test_a_site_that_does_not_answer_is_told(url: str) -> None:
    with pytest.raises(ConnectError, match="cannot be read"):
        fetch_join_file(url)


def test_a_server_that_is_away_is_named_without_the_librarys_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/prices?%24filter=x"
        with open_session() as session, pytest.raises(OSError) as away:
            session.get(url, timeout=20)
        assert describe_failure(away.value, url) == "127.0.0.1 cannot be reached from this machine"
        taken.listen()
        with open_session() as session, pytest.raises(OSError) as silent:
            session.get(url, timeout=0.1)
        assert describe_failure(silent.value, url) == "127.0.0.1 did not answer in time"
    url = "https://a.example"
    untrusted = requests.exceptions.SSLError("CERTIFICATE_VERIFY_FAILED")
    assert describe_failure(untrusted, url).endswith("not trust the certificate of a.example")
    assert describe_failure(ValueError("no JSON"), url) == f"{url}: no JSON"

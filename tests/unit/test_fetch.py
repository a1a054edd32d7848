"""What the server fetches itself, by the real curl, from web servers that break off and mislead."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from own_certificate import make_certificate

from labctl.agent.files import curl, fetch, fetch_https
from labctl.agent.files.curl import BrokenError, StatusError, check_address, open_address
from labctl.agent.files.fetch import DataSetFetch
from labctl.agent.host import retry
from labctl.agent.reply import Failure
from labctl.wire.files import FetchedSet

BODY = bytes(range(256)) * 4096
OTHER = BODY[::-1]


class Site:
    """What a web server gives for any path, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.body = BODY
        self.etag = '"one"'
        self.cut_after: list[int] = []
        self.has_ranges = True
        self.has_length = True
        self.heeds_if_range = True
        self.statuses: list[int] = []
        self.location = ""
        self.requests: list[str] = []
        self.seen: list[dict[str, str]] = []


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site = self.site
        wanted = self.headers.get("Range", "")
        if self.headers.get("If-Range", site.etag) != site.etag and site.heeds_if_range:
            wanted = ""
        start = int(wanted[6:-1]) if wanted and site.has_ranges else 0
        site.seen.append(dict(self.headers.items()))
        if site.location and self.path != "/moved":
            self._answer(302, {"Location": site.location})
        elif site.statuses:
            self._answer(site.statuses.pop(0), {})
        elif self.headers.get("If-None-Match") == site.etag:
            self._answer(304, {})
        elif start >= len(site.body) > 0 and wanted:
            self._answer(416, {"Content-Range": f"bytes */{len(site.body)}"})
        else:
            self._send(start)

    def _send(self, start: int) -> None:
        site, rest = self.site, self.site.body[start:]
        headers = {"ETag": site.etag}
        if site.has_length:
            headers["Content-Length"] = str(len(rest))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(site.body) - 1}/{len(site.body)}"
        self._answer(206 if start else 200, headers)
        with suppress(OSError):  # curl may have seen enough
            self.wfile.write(rest[: site.cut_after.pop(0)] if site.cut_after else rest)

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        self.site.requests.append(f"{self.headers.get('Range', '-')} {status}")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@contextmanager
def served(context: ssl.SSLContext | None = None) -> Iterator[Site]:
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"site": site}))
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    site.url = f"{'https' if context else 'http'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(retry.time, "sleep", lambda s: None)
    with served() as site:
        yield site


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / ".labctl").mkdir()
    return tmp_path


def fetch_set(lab: Path, address: str) -> FetchedSet:
    return fetch_https.fetch_address(DataSetFetch(lab, "set", address))


def test_a_download_that_broke_off_goes_on(site: Site, lab: Path) -> None:
    site.cut_after = [1000, 2000]
    assert fetch_set(lab, f"{site.url}/x.bin") == FetchedSet(1, len(BODY), unchanged=False)
    assert (lab / "data/set/x.bin").read_bytes() == BODY
    assert site.requests == ["- 200", "bytes=1000- 206", "bytes=3000- 206"]
    assert fetch_set(lab, f"{site.url}/x.bin").unchanged
    assert site.requests[3:] == ["- 304"]


def test_a_later_fetch_goes_on_where_an_earlier_one_ended(site: Site, lab: Path) -> None:
    site.cut_after = [10] * fetch_https.TRIES
    with pytest.raises(Failure) as caught:
        fetch_set(lab, f"{site.url}/x.bin")
    assert "broke off" in caught.value.report.what
    site.requests.clear()
    fetch_set(lab, f"{site.url}/x.bin")
    assert site.requests == ["bytes=50- 206"]
    assert (lab / "data/set/x.bin").read_bytes() == BODY


@pytest.mark.parametrize("heeds_if_range", [True, False])
def test_a_file_that_changed_meanwhile_begins_anew(
    site: Site, lab: Path, heeds_if_range: bool
) -> None:
    site.cut_after = [1000] * fetch_https.TRIES
    with pytest.raises(Failure):
        fetch_set(lab, f"{site.url}/x.bin")
    site.body, site.etag, site.heeds_if_range = OTHER, '"two"', heeds_if_range
    fetch_set(lab, f"{site.url}/x.bin")
    assert (lab / "data/set/x.bin").read_bytes() == OTHER


def test_a_site_without_ranges_is_read_from_the_start(site: Site, lab: Path) -> None:
    site.cut_after, site.has_ranges = [1000], False
    fetch_set(lab, f"{site.url}/x.bin")
    assert (lab / "data/set/x.bin").read_bytes() == BODY


def test_what_arrived_of_another_address_is_not_used(site: Site, lab: Path) -> None:
    site.cut_after = [1000] * fetch_https.TRIES
    with pytest.raises(Failure):
        fetch_set(lab, f"{site.url}/x.bin")
    site.body = OTHER
    fetch_set(lab, f"{site.url}/y.bin")
    assert (lab / "data/set/y.bin").read_bytes() == OTHER


def test_a_busy_site_is_asked_again_and_a_refusal_is_not(site: Site, lab: Path) -> None:
    site.statuses = [503, 500]
    fetch_set(lab, f"{site.url}/x.bin")
    site.statuses, site.requests = [403], []
    with pytest.raises(Failure) as caught:
        fetch_set(lab, f"{site.url}/y.bin")
    assert caught.value.report.kind == "policy"
    assert site.requests == ["- 403"]


@pytest.mark.parametrize("has_length", [True, False])
def test_a_file_that_does_not_fit_leaves_the_old_data(
    site: Site, lab: Path, monkeypatch: pytest.MonkeyPatch, has_length: bool
) -> None:
    fetch_set(lab, f"{site.url}/x.bin")
    site.body, site.etag, site.has_length = OTHER, '"two"', has_length
    monkeypatch.setattr(fetch, "count_free_bytes", lambda path: fetch.RESERVE_BYTES + 1)
    with pytest.raises(Failure) as caught:
        fetch_set(lab, f"{site.url}/x.bin")
    assert caught.value.report.kind == "disk"
    assert (lab / "data/set/x.bin").read_bytes() == BODY


def test_a_file_whose_size_is_not_announced_arrives(site: Site, lab: Path) -> None:
    site.has_length = False
    assert fetch_set(lab, f"{site.url}/x.bin").bytes == len(BODY)


@pytest.mark.parametrize(
    "address",
    ["http://example.org/x", "ftp://h/x", "file:///etc/passwd", "https:///x", "http://169.254.1.1"],
)
def test_unsafe_addresses_are_refused(address: str) -> None:
    with pytest.raises(Failure):
        check_address(address)


@pytest.mark.parametrize("address", ["https://h/x", "http://127.0.0.1:8/x", "http://[::1]/x"])
def test_safe_addresses(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize("location", ["http://192.0.2.1/x", "file:///etc/passwd", "ftp://h/x"])
def test_a_redirect_leads_to_https_alone(site: Site, lab: Path, location: str) -> None:
    site.location = location
    with pytest.raises(Failure) as caught:
        fetch_set(lab, f"{site.url}/x.bin")
    assert caught.value.report.kind == "usage"
    assert location in caught.value.report.what


def test_a_name_that_does_not_resolve_is_named(lab: Path) -> None:
    with pytest.raises(Failure) as caught:
        fetch_set(lab, "https://nosuch.invalid/x")
    assert caught.value.report.what == "the server cannot resolve the name nosuch.invalid"


def test_a_machine_that_does_not_listen_is_named(lab: Path) -> None:
    with pytest.raises(Failure) as caught:
        fetch_set(lab, "https://127.0.0.1:1/x")
    assert caught.value.report.what == "the server cannot reach 127.0.0.1"


def test_a_server_without_curl_says_so(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(lab))
    with pytest.raises(Failure) as caught:
        fetch_set(lab, "https://example.org/x")
    assert "no curl" in caught.value.report.what


def test_a_connection_that_is_closed_at_once_is_broken(site: Site) -> None:
    site.statuses = [999]
    with pytest.raises(StatusError), open_address(f"{site.url}/x", {}):
        pass
    site.cut_after = [0]
    with pytest.raises(BrokenError), open_address(f"{site.url}/x", {}) as answer:
        answer.read()


def test_an_address_stands_on_no_command_line(
    site: Site, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be signed. Quotes and line ends in it set no option of curl's."""
    lines: list[list[str]] = []
    real = subprocess.Popen

    def record(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        lines.append(words)
        return real(words, **more)

    monkeypatch.setattr(curl.subprocess, "Popen", record)
    hostile = f'{site.url}/x?signature=s3cret"\noutput="{lab}/evil'
    with open_address(hostile, {}) as answer:
        assert answer.read()
    assert "s3cret" not in str(lines)
    assert not (lab / "evil").exists()


def test_settings_of_the_account_do_not_count(
    site: Site, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab / ".curlrc").write_text('header = "Cookie: mine"\n')
    monkeypatch.setenv("HOME", str(lab))
    fetch_set(lab, f"{site.url}/x.bin")
    assert "Cookie" not in site.seen[0]


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site behind TLS; curl trusts its certificate."""
    context, public = make_certificate(tmp_path)
    monkeypatch.setenv("CURL_CA_BUNDLE", str(public))
    with served(context) as site:
        yield site


def test_https_is_never_left(secure: Site, site: Site, lab: Path) -> None:
    """Not even for this very machine."""
    fetch_set(lab, f"{secure.url}/x.bin")
    assert (lab / "data/set/x.bin").read_bytes() == BODY
    secure.location = f"{secure.url}/moved"
    secure.body, secure.etag = OTHER, '"two"'
    fetch_set(lab, f"{secure.url}/x.bin")
    assert (lab / "data/set/x.bin").read_bytes() == OTHER
    secure.location = f"{site.url}/x"
    with pytest.raises(Failure) as caught:
        fetch_set(lab, f"{secure.url}/x.bin")
    assert caught.value.report.kind == "usage"
    assert site.requests == []


def test_a_certificate_that_nobody_vouches_for_is_refused(
    secure: Site, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CURL_CA_BUNDLE")
    with pytest.raises(Failure) as caught:
        fetch_set(lab, f"{secure.url}/x.bin")
    report = caught.value.report
    assert report.what == "the server does not trust the certificate of 127.0.0.1"
    assert "certificate" in report.why
    assert "\n" not in report.why
    assert report.kind == "policy"
    assert secure.requests == []

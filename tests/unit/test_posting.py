"""One request of an upload: whom it trusts, and what it sends nobody."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from own_certificate import make_certificate

from labctl.submissions import posting

FIELDS = {"key": "drop/hw3/alice/part-01", "policy": "p"}
PART = b"0123456789" * 100_000


class Bucket:
    def __init__(self) -> None:
        self.url = ""
        self.status = 204
        self.requests: list[tuple[dict[str, str], bytes]] = []


class Handler(BaseHTTPRequestHandler):
    bucket: Bucket

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bucket.requests.append((dict(self.headers.items()), body))
        self.send_response(self.bucket.status)
        self.send_header("Location", f"{self.bucket.url}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Behind a certificate that this machine trusts, and whose host is in ~/.netrc."""
    context, public = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(public))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password s3cret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket = Bucket()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"bucket": bucket}))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    bucket.url = f"https://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def post(bucket: Bucket, start: int, length: int) -> tuple[int, list[int]]:
    told: list[int] = []
    form = posting._build_form(FIELDS, io.BytesIO(PART), (start, length), told.append)
    status, _ = posting._send_request(bucket.url, "POST", form)
    return status, told


def test_a_part_is_sent_with_its_fields_and_progress(bucket: Bucket) -> None:
    status, told = post(bucket, 10, 500_000)
    assert status == 204
    ((headers, body),) = bucket.requests
    assert PART[10:500_010] in body
    assert PART[10:500_011] not in body
    assert b'name="key"\r\n\r\ndrop/hw3/alice/part-01\r\n' in body
    assert body.index(b'name="file"') > body.index(b'name="policy"'), "S3 ignores what follows it"
    assert told == sorted(told)
    assert told[-1] == 500_010
    assert len(told) > 2
    assert "Authorization" not in headers


def test_no_redirect_is_followed(bucket: Bucket) -> None:
    bucket.status = 307
    assert post(bucket, 0, 10)[0] == 307
    assert len(bucket.requests) == 1


def test_an_authority_that_nobody_knows_is_refused(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(OSError, match="certificate"):
        post(bucket, 0, 10)
    assert bucket.requests == []

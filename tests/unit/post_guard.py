"""moto's S3 behind S3's own rules for who bears no credentials.

moto takes any form and any reader. Here a form is taken only with a policy that is signed, not
over, and kept to the letter; a reader only with a signed address. Everybody else is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import logging
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

ACCESS, SECRET, REGION = "AKIAIOSFODNN7EXAMPLE", "nothing-but-a-test", "us-east-1"
IGNORED = {"file", "policy", "x-amz-signature"}


class Guard:
    """A WSGI application in front of another. `now` can be moved; `broken` breaks posts off.

    Anybody may read the bucket `public`; who signs needs leave of an own account, and has none.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.ahead_s = 0.0
        self.broken: list[str] = []
        self.posts: list[str] = []
        self.public = ""
        self.reads: list[str] = []
        self.ranges: dict[str, str] = {}

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        method, signed = environ["REQUEST_METHOD"], "HTTP_AUTHORIZATION" in environ
        path = environ["PATH_INFO"]
        if method == "GET" and self.public and path.split("/")[1] == self.public:
            self.reads.append(path)
            self.ranges[path] = environ.get("HTTP_RANGE", "")
            if not signed:
                return self.inner(environ, start)
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code></Error>"]
        if signed:
            return self.inner(environ, start)
        query = urllib.parse.parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        if method == "POST" and not query:
            length = int(environ["CONTENT_LENGTH"])
            body = environ["wsgi.input"].read(length)
            said = self._form(environ, body)
            environ["wsgi.input"] = io.BytesIO(body)
        elif method == "GET":
            said = self._address(environ, query)
        else:
            said = "AccessDenied"
        if not said:
            return self.inner(environ, start)
        status = "400 Bad Request" if said == "EntityTooLarge" else "403 Forbidden"
        if said == "SlowDown":
            status = "503 Slow Down"
        start(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{said}</Code></Error>".encode()]

    def _form(self, environ: dict[str, Any], body: bytes) -> str:
        """What S3 says against a post; "" where it takes it."""
        from werkzeug.formparser import parse_form_data

        _, form, files = parse_form_data({**environ, "wsgi.input": io.BytesIO(body)})
        fields = {name.lower(): value for name, value in form.items()}
        content = b""
        for file in files.values():
            content = file.read()
            file.close()
        if "policy" not in fields:
            return "AccessDenied"
        if not self._signs(fields["policy"], fields.get("x-amz-signature", "")):
            return "SignatureDoesNotMatch"
        policy = json.loads(base64.b64decode(fields["policy"]))
        if self._now() > datetime.fromisoformat(policy["expiration"]):
            return "AccessDenied: Policy expired"
        said = _against({**fields, "bucket": environ["PATH_INFO"].strip("/")}, policy, len(content))
        self.posts.append(fields.get("key", ""))
        if self.broken and fields.get("key", "").endswith(self.broken[0]):
            self.broken.pop(0)
            return "SlowDown"
        return said

    def _now(self) -> datetime:
        return datetime.fromtimestamp(datetime.now(UTC).timestamp() + self.ahead_s, UTC)

    def _address(self, environ: dict[str, Any], query: dict[str, list[str]]) -> str:
        plain = {name: values[0] for name, values in query.items()}
        signature = plain.pop("X-Amz-Signature", "")
        if not signature:
            return "AccessDenied"
        began = datetime.strptime(plain["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if (self._now() - began).total_seconds() > int(plain["X-Amz-Expires"]):
            return "AccessDenied: Request has expired"
        words = sorted((_quoted(name), _quoted(value)) for name, value in plain.items())
        path = urllib.parse.quote(environ["PATH_INFO"])
        line = "&".join(f"{name}={value}" for name, value in words)
        host = f"host:{environ['HTTP_HOST']}"
        asked = "\n".join(["GET", path, line, host, "", "host", "UNSIGNED-PAYLOAD"])
        scope = "/".join(plain["X-Amz-Credential"].split("/")[1:])
        digest = hashlib.sha256(asked.encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", plain["X-Amz-Date"], scope, digest])
        return "" if self._signs(text, signature) else "SignatureDoesNotMatch"

    def _signs(self, text: str, signature: str) -> bool:
        """Whether a signature of today's, or of the days before it, is ours."""
        for day in range(9):
            moment = datetime.fromtimestamp(datetime.now(UTC).timestamp() - day * 86400, UTC)
            key = f"AWS4{SECRET}".encode()
            for part in (moment.strftime("%Y%m%d"), REGION, "s3", "aws4_request"):
                key = hmac.new(key, part.encode(), hashlib.sha256).digest()
            found = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
            if hmac.compare_digest(found, signature):
                return True
        return False


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, "")


def _against(fields: dict[str, str], policy: dict[str, Any], size: int) -> str:
    """The first condition that does not hold, and every field that none allows."""
    allowed = set(IGNORED) | {"bucket"}
    for condition in policy["conditions"]:
        if isinstance(condition, dict):
            ((name, value),) = condition.items()
            condition = ["eq", f"${name}", value]
        kind, first, second = condition
        if kind == "content-length-range":
            if not first <= size <= second:
                return "EntityTooLarge" if size > second else "EntityTooSmall"
            continue
        name = first.removeprefix("$").lower()
        allowed.add(name)
        found = fields.get(name, "")
        if not (found == second if kind == "eq" else found.startswith(second)):
            return "AccessDenied"
    return "AccessDenied" if set(fields) - allowed else ""


@contextmanager
def guarded_s3() -> Iterator[tuple[Guard, str]]:
    """(the guard, the address) of an S3 that is empty."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    guard = Guard(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, guard, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield guard, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

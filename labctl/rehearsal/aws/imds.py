"""The metadata service (version 2) of a machine, on a Unix socket that only the machine reaches.

Tokens are required, as labctl configures it; a PUT returns one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec

from labctl.model import Value

TOKEN_PATH = "/latest/api/token"
MAX_TTL_S = 21_600

# Returns the text at this path below /latest/, or None.
MetadataLookup = Callable[[str], str | None]


class MetadataApp:
    """A WSGI application that serves the results of `lookup` to requests with a token."""

    def __init__(self, lookup: MetadataLookup) -> None:
        self._lookup = lookup
        self._tokens: dict[str, float] = {}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status, body = self._answer(environ)
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    def _answer(self, environ: WSGIEnvironment) -> tuple[str, bytes]:
        path = environ["PATH_INFO"]
        if path == TOKEN_PATH:
            return self._issue_token(environ)
        if environ["REQUEST_METHOD"] != "GET":
            return "405 Method Not Allowed", b""
        token = environ.get("HTTP_X_AWS_EC2_METADATA_TOKEN", "")
        if self._tokens.get(token, 0.0) < time.monotonic():
            return "401 Unauthorized", b""
        text = self._lookup(path.removeprefix("/latest/").rstrip("/"))
        return ("404 Not Found", b"") if text is None else ("200 OK", text.encode())

    def _issue_token(self, environ: WSGIEnvironment) -> tuple[str, bytes]:
        if environ["REQUEST_METHOD"] != "PUT":
            return "405 Method Not Allowed", b""
        ttl = environ.get("HTTP_X_AWS_EC2_METADATA_TOKEN_TTL_SECONDS", "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= MAX_TTL_S:
            return "400 Bad Request", b""
        token = secrets.token_urlsafe(40)
        self._tokens[token] = time.monotonic() + int(ttl)
        return "200 OK", token.encode()


def format_json(document: Value) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()

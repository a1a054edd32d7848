"""The metadata service of a machine at Google Cloud: what labctl's watchdog asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from wsgiref.types import StartResponse, WSGIEnvironment

PREFIX = "/computeMetadata/v1/"
HEADER = "HTTP_METADATA_FLAVOR"
FLAVOR = ("Metadata-Flavor", "Google")

# Returns the text at this path below PREFIX, or None.
Lookup = Callable[[str], str | None]


class GceMetadataApp:
    """A WSGI application. Like Google's, it refuses requests without its header."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status, text = self._answer(environ)
        body = text.encode()
        headers = [
            ("Content-Type", "application/text"),
            ("Content-Length", str(len(body))),
            FLAVOR,
        ]
        start_response(status, headers)
        return [body]

    def _answer(self, environ: WSGIEnvironment) -> tuple[str, str]:
        if environ.get(HEADER) != FLAVOR[1]:
            return "403 Forbidden", "Your client does not have permission"
        path = environ["PATH_INFO"]
        text = self._lookup(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None
        return ("404 Not Found", "") if text is None else ("200 OK", text)

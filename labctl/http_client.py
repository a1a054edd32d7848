"""HTTP requests to servers outside of labctl, over the library requests.

requests takes 50 ms or more to import, so only a call imports it. Its errors are OSErrors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from requests import Response, Session

with lazy_imports(__name__):
    import ssl

    import requests
    from requests import adapters

# A compressed block may be up to 1,000 times as large once it is read.
_BLOCK_BYTES = 16 * 1024
_LOOPBACK = re.compile(r"http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?(/\S*)?")


def is_confidential(url: str) -> bool:
    """Whether nobody else can read what is sent to `url`: by https, or inside this machine."""
    return url.startswith("https://") or _LOOPBACK.fullmatch(url) is not None


def open_session() -> Session:
    """Open a session that trusts this machine's CAs and sends no stored password."""

    class SystemTrust(adapters.HTTPAdapter):
        def init_poolmanager(self, *words: Any, **more: Any) -> None:
            super().init_poolmanager(*words, ssl_context=ssl.create_default_context(), **more)

    session = requests.Session()
    session.headers["User-Agent"] = "labctl"
    session.auth = lambda request: request  # otherwise requests reads ~/.netrc
    session.mount("https://", SystemTrust())
    return session


def describe_failure(error: Exception, url: str) -> str:
    """Describe why a request to `url` failed, in words where the server did not answer at all."""
    host = urlsplit(url).hostname
    if isinstance(error, requests.exceptions.SSLError):  # for requests, a ConnectionError too
        return f"this machine does not trust the certificate of {host}"
    if isinstance(error, requests.Timeout):
        return f"{host} did not answer in time"
    if isinstance(error, requests.ConnectionError):
        return f"{host} cannot be reached from this machine"
    return f"{url}: {error}"


def read_body(response: Response, most_bytes: int) -> bytes:
    """Read the body of a response that was requested with `stream`, or its first `most_bytes`.

    Close the response afterwards: its connection is still open if there was more.
    """
    body = bytearray()
    for block in response.iter_content(min(_BLOCK_BYTES, most_bytes)):
        body += block
        if len(body) >= most_bytes:
            break
    return bytes(body[:most_bytes])

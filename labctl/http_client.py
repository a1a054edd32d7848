"""HTTP requests to servers outside of labctl, over the library requests.

requests takes 50 ms or more to import, so only a call imports it. Its errors are OSErrors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from requests import Response, Session

# A compressed block may be up to 1,000 times as large once it is read.
_BLOCK_BYTES = 16 * 1024


def open_session() -> Session:
    """Open a session that trusts this machine's CAs and sends no stored password."""
    import ssl

    import requests
    from requests.adapters import HTTPAdapter

    class SystemTrust(HTTPAdapter):
        def init_poolmanager(self, *words: Any, **more: Any) -> None:
            super().init_poolmanager(*words, ssl_context=ssl.create_default_context(), **more)

    session = requests.Session()
    session.headers["User-Agent"] = "labctl"
    session.auth = lambda request: request  # otherwise requests reads ~/.netrc
    session.mount("https://", SystemTrust())
    return session


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

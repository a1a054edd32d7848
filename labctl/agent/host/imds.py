"""labctl's only client for a cloud machine's metadata service (IMDS), version 2.

Only the machine itself can use it: labctl limits the token's response to one network hop.
"""

from __future__ import annotations

import http.client
import time
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import urlsplit

from ...wire.watchdog import IMDS

TIMEOUT_S = 1.0
TOKEN_S = 6 * 3600
MOST_BYTES = 65536


class ImdsResponse(NamedTuple):
    """A response. `dated_s` is its own Date (Unix seconds), so that comparisons use one clock."""

    status: int
    body: str
    dated_s: float


class Imds:
    """The metadata service. Every call may raise OSError; a token is fetched when needed.

    Paths are below /latest/, such as "meta-data/instance-id".
    """

    def __init__(self, url: str = IMDS, timeout_s: float = TIMEOUT_S) -> None:
        place = urlsplit(url)
        self._address = (place.hostname or "", place.port or 80)
        self._timeout_s = timeout_s
        self._token = ""
        self._renew_s = 0.0

    @property
    def has_token(self) -> bool:
        """Whether the service has issued a token: something answers there."""
        return bool(self._token)

    def get(self, path: str) -> ImdsResponse:
        """Get a path with a token."""
        response = self._get_with_token(path)
        if response.status == 401:
            self._token = ""
            response = self._get_with_token(path)
        return response

    def get_without_token(self, path: str) -> ImdsResponse:
        """Get a path as version 1 of the service gives it."""
        return self._exchange("GET", path, {})

    def _get_with_token(self, path: str) -> ImdsResponse:
        if not self._token or time.monotonic() > self._renew_s:
            ttl_header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            response = self._exchange("PUT", "api/token", ttl_header)
            if response.status != 200:
                raise OSError(f"the metadata service returned no token (HTTP {response.status})")
            self._token, self._renew_s = response.body, time.monotonic() + TOKEN_S / 2
        return self._exchange("GET", path, {"X-aws-ec2-metadata-token": self._token})

    def _exchange(self, method: str, path: str, headers: dict[str, str]) -> ImdsResponse:
        link = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            link.request(method, f"/latest/{path}", headers=headers)
            reply = link.getresponse()
            body = reply.read(MOST_BYTES).decode(errors="replace")
            if reply.length:
                raise OSError("the metadata service sent an incomplete or oversized response")
            return ImdsResponse(reply.status, body, _dated_s(reply.getheader("Date")))
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"the metadata service: {error!r}") from None
        finally:
            link.close()


def _dated_s(text: str | None) -> float:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except (TypeError, ValueError, IndexError):
        return time.time()

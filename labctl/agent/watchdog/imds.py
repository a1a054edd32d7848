"""Client for a cloud machine's metadata service (IMDS version 2), polled for notices.

Only the machine itself can use it: labctl limits the token's response to one network hop.
"""

from __future__ import annotations

import http.client
import time
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from .provider_notice import ReclaimNotice, parse_interruption, parse_rebalance

ADDRESS = "169.254.169.254"
TIMEOUT_S = 1.0
TOKEN_S = 6 * 3600
# At boot the service may start late. Machines without one are tried three times, then left alone.
LOOK_AGAIN_S = (0.0, 2.0, 10.0)
ACTION = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
LIFE = "meta-data/instance-life-cycle"
# The life cycles that come with notices. Other replies (a captive portal, say) are ignored.
MAY_BE_TAKEN = ("spot", "scheduled", "capacity-block")
MOST_BYTES = 65536


class ImdsResponse(NamedTuple):
    """A response. `dated_s` is its own Date (Unix seconds), so that comparisons use one clock."""

    status: int
    body: str
    dated_s: float


class Imds:
    """The metadata service. Every call may raise OSError; a token is fetched when needed."""

    def __init__(self, address: str = ADDRESS, port: int = 80) -> None:
        self._address = (address, port)
        self._token = ""
        self._renew_s = 0.0

    def get(self, path: str) -> ImdsResponse:
        response = self._get_with_token(path)
        if response.status == 401:
            self._token = ""
            response = self._get_with_token(path)
        return response

    def read_notices(self) -> list[ReclaimNotice]:
        """Return the current notices. OSError if the service does not answer properly."""
        notices = []
        for path in (REBALANCE, ACTION):
            response = self.get(path)
            if response.status == 200:
                notices.append(
                    parse_rebalance(response.body)
                    if path == REBALANCE
                    else parse_interruption(response.body, response.dated_s)
                )
            elif response.status != 404:
                raise OSError(f"the metadata service returned HTTP {response.status}")
        return notices

    def _get_with_token(self, path: str) -> ImdsResponse:
        if not self._token or time.monotonic() > self._renew_s:
            ttl_header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            response = self._exchange("PUT", "api/token", ttl_header)
            if response.status != 200:
                raise OSError(f"the metadata service returned no token (HTTP {response.status})")
            self._token, self._renew_s = response.body, time.monotonic() + TOKEN_S / 2
        return self._exchange("GET", path, {"X-aws-ec2-metadata-token": self._token})

    def _exchange(self, method: str, path: str, headers: dict[str, str]) -> ImdsResponse:
        link = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            link.request(method, f"/latest/{path}", headers=headers)
            reply = link.getresponse()
            body = reply.read(MOST_BYTES).decode(errors="replace")
            if reply.length:
                raise OSError("the metadata service sent an incomplete or oversized response")
            return ImdsResponse(reply.status, body, _dated_s(reply.getheader("Date")))
        except http.client.HTTPException as error:
            raise OSError(f"the metadata service: {error!r}") from None
        finally:
            link.close()


def _dated_s(text: str | None) -> float:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except (TypeError, ValueError, IndexError):
        return time.time()


def has_reclaim_notices(imds: Imds) -> bool:
    """Return whether this machine has the service and may be reclaimed. Takes up to 15 s.

    An on-demand machine gets no notices.
    """
    for pause_s in LOOK_AGAIN_S:
        time.sleep(pause_s)
        try:
            response = imds.get(LIFE)
        except OSError:
            continue
        return response.status == 200 and response.body.strip() in MAY_BE_TAKEN
    return False

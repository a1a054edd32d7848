"""A cloud machine's metadata service (IMDS, version 2), asked for notices.

Only the machine itself can ask: the token's answer travels one hop (labctl makes servers so).
"""

from __future__ import annotations

import http.client
import time
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from .provider_notice import Notice, interruption, rebalance

ADDRESS = "169.254.169.254"
TIMEOUT_S = 1.0
TOKEN_S = 6 * 3600
# At boot it may answer a little late. Who has none is asked three times and then left alone.
LOOK_AGAIN_S = (0.0, 2.0, 10.0)
ACTION = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
LIFE = "meta-data/instance-life-cycle"
# The lives that come with notices. Whatever else answers there (a portal, say) is not believed.
MAY_BE_TAKEN = ("spot", "scheduled", "capacity-block")
MOST_BYTES = 65536


class Said(NamedTuple):
    """`dated_s` is the answer's own date (Unix): both sides of a comparison are then its clock."""

    status: int
    body: str
    dated_s: float


class Imds:
    """Every call may raise OSError. A token is asked for when there is none or it ran out."""

    def __init__(self, address: str = ADDRESS, port: int = 80) -> None:
        self._where = (address, port)
        self._token = ""
        self._renew_s = 0.0

    def get(self, path: str) -> Said:
        said = self._asked(path)
        if said.status == 401:
            self._token = ""
            said = self._asked(path)
        return said

    def notices(self) -> list[Notice]:
        """What it says now; [] for nothing. OSError where it does not answer properly."""
        found = []
        for path in (REBALANCE, ACTION):
            said = self.get(path)
            if said.status == 200:
                found.append(
                    rebalance(said.body)
                    if path == REBALANCE
                    else interruption(said.body, said.dated_s)
                )
            elif said.status != 404:
                raise OSError(f"the metadata service answered {said.status}")
        return found

    def _asked(self, path: str) -> Said:
        if not self._token or time.monotonic() > self._renew_s:
            lasting = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            said = self._exchange("PUT", "api/token", lasting)
            if said.status != 200:
                raise OSError(f"the metadata service gave no token ({said.status})")
            self._token, self._renew_s = said.body, time.monotonic() + TOKEN_S / 2
        return self._exchange("GET", path, {"X-aws-ec2-metadata-token": self._token})

    def _exchange(self, method: str, path: str, headers: dict[str, str]) -> Said:
        link = http.client.HTTPConnection(*self._where, timeout=TIMEOUT_S)
        try:
            link.request(method, f"/latest/{path}", headers=headers)
            reply = link.getresponse()
            body = reply.read(MOST_BYTES).decode(errors="replace")
            if reply.length:
                raise OSError("the metadata service sent half an answer, or far too much")
            return Said(reply.status, body, _dated_s(reply.getheader("Date")))
        except http.client.HTTPException as error:
            raise OSError(f"the metadata service: {error!r}") from None
        finally:
            link.close()


def _dated_s(text: str | None) -> float:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except (TypeError, ValueError, IndexError):
        return time.time()


def found(imds: Imds) -> bool:
    """Whether this machine has such a service and may be taken back. Takes up to 15 s: in a thread.

    A machine that is paid for on demand gets no notices.
    """
    for pause_s in LOOK_AGAIN_S:
        time.sleep(pause_s)
        try:
            said = imds.get(LIFE)
        except OSError:
            continue
        return said.status == 200 and said.body.strip() in MAY_BE_TAKEN
    return False

"""A client for the Scheduled Events of Azure's metadata service.

It has the address of EC2's, other paths, and needs no token: its header keeps web pages out.
"""

import http.client
import time
from email.utils import parsedate_to_datetime
from typing import NamedTuple, Optional, Tuple
from urllib.parse import urlsplit

from ...wire.codec import MessageError, decode
from ...wire.watchdog import IMDS

TIMEOUT_S = 3.0
MOST_BYTES = 65536
PATH = "/metadata/scheduledevents?api-version=2020-07-01"


class ScheduledEvent(NamedTuple):
    """An event, with Azure's own names. `NotBefore` is an HTTP date, "" once it has begun."""

    EventId: str = ""
    EventType: str = ""
    NotBefore: str = ""

    def compute_left_s(self, now_s: float) -> float:
        """Return the seconds left at `now_s` (Unix seconds)."""
        at = parse_http_date(self.NotBefore)
        return 0.0 if at is None else max(0.0, at - now_s)


class EventDocument(NamedTuple):
    Events: Tuple[ScheduledEvent, ...] = ()


class EventReply(NamedTuple):
    """The events, and when the reply was sent (Unix seconds), so that one clock is compared."""

    events: Tuple[ScheduledEvent, ...]
    dated_s: float


class AzureMetadata:
    """The metadata service of a machine at Azure."""

    def __init__(self, url: str = IMDS, timeout_s: float = TIMEOUT_S) -> None:
        place = urlsplit(url)
        self._address = (place.hostname or "", place.port or 80)
        self._timeout_s = timeout_s

    def read_events(self, timeout_s: float = 0.0) -> EventReply:
        """Read the events. OSError if the service does not answer, or not properly."""
        link = http.client.HTTPConnection(*self._address, timeout=timeout_s or self._timeout_s)
        try:
            link.request("GET", PATH, headers={"Metadata": "true"})
            reply = link.getresponse()
            body = reply.read(MOST_BYTES)
            if reply.status != 200:
                raise OSError(f"the metadata service returned HTTP {reply.status}")
            dated_s = parse_http_date(reply.getheader("Date") or "")
            now_s = time.time() if dated_s is None else dated_s
            return EventReply(decode(EventDocument, body).Events, now_s)
        except (http.client.HTTPException, MessageError) as error:
            raise OSError(f"the metadata service: {error!r}") from None
        finally:
            link.close()


def parse_http_date(text: str) -> Optional[float]:
    """Return the Unix time of text like Mon, 19 Sep 2016 18:29:47 GMT; None if it is not one."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, IndexError):
        return None

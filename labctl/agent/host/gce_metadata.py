"""A client for the metadata service of Google Compute Engine.

It has the address of EC2's, other paths, and needs no token: its header keeps web pages out.
"""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from ...wire.watchdog import IMDS

TIMEOUT_S = 1.0
MOST_BYTES = 65536
HEADER = {"Metadata-Flavor": "Google"}


class GceMetadata:
    """The metadata service. Paths are below /computeMetadata/v1/, such as "instance/name"."""

    def __init__(self, url: str = IMDS, timeout_s: float = TIMEOUT_S) -> None:
        place = urlsplit(url)
        self._address = (place.hostname or "", place.port or 80)
        self._timeout_s = timeout_s

    def get(self, path: str) -> str:
        """Get a path. OSError if the service does not answer, or not properly."""
        link = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            link.request("GET", f"/computeMetadata/v1/{path}", headers=HEADER)
            reply = link.getresponse()
            body = reply.read(MOST_BYTES).decode(errors="replace").strip()
        except http.client.HTTPException as error:
            raise OSError(f"the metadata service: {error!r}") from None
        finally:
            link.close()
        if reply.status != 200 or reply.getheader("Metadata-Flavor") != HEADER["Metadata-Flavor"]:
            raise OSError(f"the metadata service returned HTTP {reply.status}")
        return body

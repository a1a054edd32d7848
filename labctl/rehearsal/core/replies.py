"""HTTP replies of a simulated cloud."""

from __future__ import annotations

from labctl.model import Value


class HttpReply(Value, frozen=True):
    """An HTTP response. Status 0 means none: the connection is closed after at most `hold_s`."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    hold_s: float = 0.0

    def list_headers(self) -> list[tuple[str, str]]:
        """List the headers with the body's length, whatever length they had."""
        headers = [pair for pair in self.headers if pair[0].lower() != "content-length"]
        return [*headers, ("Content-Length", str(len(self.body)))]

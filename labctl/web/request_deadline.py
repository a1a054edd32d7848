"""HTTP/1.1 with a deadline for each request: a browser that sends nothing keeps no connection.

uvicorn waits forever for the rest of a request. Connections that never complete one need no
session, and would use up the keeper's file descriptors.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# until the head of a request must have arrived, on a connection that has none to answer
HEAD_S = 20.0


class DeadlineProtocol(H11Protocol):
    """Closes a connection if it has had no request to answer for HEAD_S.

    What arrives meanwhile does not extend that: neither parts of a head, nor the rest of a body
    that nobody reads.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_deadline()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        super().handle_websocket_upgrade(event)
        self._cancel_deadline()

    def _set_deadline(self) -> None:
        is_upgraded = self.transport.get_protocol() is not self
        cycle: Any = self.cycle  # uvicorn has None before the first request
        if is_upgraded or not (cycle is None or cycle.response_complete):
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

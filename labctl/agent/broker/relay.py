"""Relays an account's request to the Docker Engine, and the engine's response to the account.

h11 rebuilds both from what it parsed. Of what a client sends, the engine's parser only gets the
bytes of a body, framed here, and the bytes after both sides have switched from HTTP.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from itertools import chain
from typing import Any, Iterator
from urllib.parse import urlencode

import h11

from ..host.engine import EngineRequestError
from .http import CHUNK, MOST_JSON, HttpRefusal, Query, Request, drain, is_readable

MOST_ANSWER_HEAD = 256 * 1024
ENDED = "the Docker Engine closed the connection during its response"
# Headers of a single connection, which are not passed on.
OWN_HOP = (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer")
UPGRADE = [("Connection", "Upgrade"), ("Upgrade", "tcp")]


class EngineLinkError(Exception):
    """The engine closed the connection, or its response is not HTTP."""


class EngineCall:
    """One request to the Docker Engine, and its response."""

    def __init__(self, socket_path: str) -> None:
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_ANSWER_HEAD)
        self.link = socket.socket(socket.AF_UNIX)
        try:
            self.link.connect(socket_path)
        except OSError as error:
            self.link.close()
            raise HttpRefusal(503, f"the Docker Engine does not answer: {error.strerror}") from None

    def __enter__(self) -> EngineCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def send_all(self, head: h11.Request, body: Iterator[bytes]) -> None:
        """Send the request. If the engine hangs up early, it has sent its response by then."""
        data = (h11.Data(data=block) for block in body if block)
        for event in chain((head,), data, (h11.EndOfMessage(),)):
            text = self._connection.send(event)
            try:
                self.link.sendall(text or b"")
            except OSError:
                return

    def receive(self, client: socket.socket | None = None) -> Any:
        """Wait for the engine's next event, without a time limit while `client` is connected."""
        while True:
            try:
                event = self._connection.next_event()
            except h11.RemoteProtocolError as error:
                raise EngineLinkError(f"{ENDED}: {error}"[:300]) from None
            if event is not h11.NEED_DATA:
                return event
            is_readable(self.link, client=client)
            try:
                self._connection.receive_data(self.link.recv(CHUNK))
            except OSError:
                raise EngineLinkError(ENDED) from None

    def take_rest(self) -> bytes:
        """Return the bytes after the response, once both sides have switched from HTTP."""
        return self._connection.trailing_data[0]


def parse_head(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Parse a response to the broker's own request: (status, headers, the bytes after the head)."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_ANSWER_HEAD)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "docker")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(answer)
    try:
        head = connection.next_event()
    except h11.RemoteProtocolError as error:
        raise EngineRequestError(0, f"{ENDED}: {error}"[:300]) from None
    if not isinstance(head, h11.Response):
        raise EngineRequestError(0, ENDED)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    return head.status_code, headers, connection.trailing_data[0]


def pass_on(request: Request, engine: str, path: str, query: Query, body: bytes = b"") -> int:
    """Send a request to the engine at the socket `engine`, relay the response, return its status.

    The client's bytes are relayed only after the engine has switched to a raw stream.
    """
    for _ in request.read_blocks(MOST_JSON):
        continue  # the client's body has been parsed before, or is ignored
    framing = [("Content-Length", str(len(body)))]
    head = _make_head(request, path, query, "application/json", framing, upgrade=request.upgrade)
    with EngineCall(engine) as call:
        call.send_all(head, iter((body,)))
        return _deliver(request, call)


def send_on(request: Request, engine: str, path: str, query: Query, body: Iterator[bytes]) -> None:
    """Do the same with a body of unknown length, for a tar that is checked while it streams."""
    blocks = (block for block in body if block)
    first = next(blocks, b"")  # a client that sends nothing costs the engine nothing
    head = _make_head(request, path, query, "application/x-tar", [("Transfer-Encoding", "chunked")])
    with EngineCall(engine) as call:
        call.send_all(head, chain((first,), blocks))
        _deliver(request, call)
    if not request.is_complete:
        drain(request.link)


def _make_head(
    request: Request,
    path: str,
    query: Query,
    kind: str,
    framing: list[tuple[str, str]],
    *,
    upgrade: bool = False,
) -> h11.Request:
    """Build the head, which has only checked values of the client."""
    target = f"{request.version}{path}" + (f"?{urlencode(query)}" if query else "")
    headers = [("Host", "docker"), ("Content-Type", kind), *framing]
    headers += UPGRADE if upgrade else [("Connection", "close")]
    try:
        return h11.Request(method=request.method, target=target, headers=headers)
    except h11.LocalProtocolError:
        raise HttpRefusal(400, "the path contains invalid characters") from None


def _deliver(request: Request, call: EngineCall) -> int:
    """Relay the engine's response as it arrives; return its status."""
    try:
        head = call.receive(request.link)
        while isinstance(head, h11.InformationalResponse) and head.status_code != 101:
            head = call.receive(request.link)
    except EngineLinkError as error:
        raise HttpRefusal(502, str(error)) from None
    headers = [pair for pair in head.headers.raw_items() if pair[0].lower() not in OWN_HOP]
    upgrade_headers = [(name.encode(), value.encode()) for name, value in UPGRADE]
    if isinstance(head, h11.InformationalResponse):
        request.send(
            h11.InformationalResponse(
                status_code=101, headers=[*headers, *upgrade_headers], reason=head.reason
            )
        )
        _join(request, call)
        return 101
    headers.append((b"Connection", b"close"))
    status = int(head.status_code)
    request.send(h11.Response(status_code=status, headers=headers, reason=head.reason))
    try:
        while isinstance(event := call.receive(request.link), h11.Data):
            request.send(h11.Data(data=event.data))
    except EngineLinkError as error:
        raise ConnectionAbortedError(str(error)) from None  # the client sees the truncated response
    request.send(h11.EndOfMessage())
    return status


def _join(request: Request, call: EngineCall) -> None:
    """Copy bytes in both directions until the engine or the client hangs up."""

    def carry_inward() -> None:
        with suppress(OSError):
            call.link.sendall(request.take_rest())
            while block := request.link.recv(CHUNK):
                call.link.sendall(block)
            call.link.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=carry_inward, daemon=True)
    sender.start()
    with suppress(OSError):
        request.link.sendall(call.take_rest())
        while is_readable(call.link, client=request.link) and (block := call.link.recv(CHUNK)):
            request.link.sendall(block)
    for link in (request.link, call.link):
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
    sender.join()

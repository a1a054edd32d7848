"""HTTP between accounts and the broker: one request a connection, parsed by h11.

Root parses untrusted bytes here, so it uses no parser of our own. relay.py rebuilds the request for
the engine from what was parsed.
"""

from __future__ import annotations

import json
import re
import select
import socket
import time
from http import HTTPStatus
from typing import Any, Dict, Iterator

import h11

from .detection import LIMIT_KEY
from .strict_json import parse_json, parse_query

CHUNK = 256 * 1024
MOST_HEAD = 32 * 1024
MOST_JSON = 1024 * 1024
HEAD_S = 20.0  # for a complete head
IDLE_S = 20.0  # between two parts of a body
# The same for an image: `docker save` writes a large one to disk before it sends the first byte.
# A silent account only blocks one of its own connections, and none of the engine.
UPLOAD_IDLE_S = 1800.0
LINGER_S = 2.0
MOST_REASON = 300
VERSION = re.compile(r"^/v[0-9]{1,2}\.[0-9]{1,3}(?=/)")
Query = Dict[str, str]


class HttpRefusal(Exception):
    """An error response to the account, with an HTTP status and message, in the engine's format."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class LimitRefusal(HttpRefusal):
    """A refusal because of other accounts' use, or of the account's own limits."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, f"shared server: {message}")


class Request:
    """The head of a request, and its body as it arrives."""

    def __init__(self, link: socket.socket, connection: h11.Connection, head: h11.Request) -> None:
        names = [name for name, _ in head.headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            # h11 uses one of them, other parsers the other: they would disagree on the body's end.
            raise HttpRefusal(
                400, "a request must not have both Content-Length and Transfer-Encoding"
            )
        path, _, query = head.target.decode("ascii").partition("?")
        version = VERSION.match(path)
        self.link = link
        self.method = head.method.decode("ascii")
        self.version = version.group() if version else ""
        self.path = path[len(self.version) :]
        try:
            self.query: Query = parse_query(query)
        except ValueError as error:
            raise HttpRefusal(400, f"the query cannot be read: {error}") from None
        self.upgrade = (b"upgrade", b"tcp") in [(name, kind.lower()) for name, kind in head.headers]
        self.is_complete = False
        self._connection = connection

    def read_blocks(self, most: int, idle_s: float = IDLE_S) -> Iterator[bytes]:
        """Yield the body. Refusal if it exceeds `most` bytes, or stalls for `idle_s`."""
        while not self.is_complete:
            if self._connection.they_are_waiting_for_100_continue:
                self.send(h11.InformationalResponse(status_code=100, headers=[]))
            deadline = time.monotonic() + idle_s
            event = read_event(self.link, self._connection, deadline)
            if isinstance(event, h11.EndOfMessage):
                self.is_complete = True
            elif isinstance(event, h11.Data):
                most -= len(event.data)
                if most < 0:
                    raise HttpRefusal(413, "the request is larger than the shared server allows")
                yield bytes(event.data)

    def read_json_body(self) -> dict[str, object]:
        """Parse the body as an object; {} without a body."""
        try:
            body = parse_json(b"".join(self.read_blocks(MOST_JSON)) or b"{}")
        except ValueError as error:
            raise HttpRefusal(400, f"the body is not valid JSON: {error}") from None
        if body is None:
            return {}
        if not isinstance(body, dict):
            raise HttpRefusal(400, "the body is not an object")
        return body

    def send(self, event: h11.Event) -> None:
        """Send one event of the response."""
        self.link.sendall(self._connection.send(event) or b"")

    def take_rest(self) -> bytes:
        """Return the bytes after the request, once both sides have switched from HTTP."""
        return self._connection.trailing_data[0]


def read_request(link: socket.socket) -> Request | None:
    """Read a request; None if the client hung up without sending one."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD)
    event = read_event(link, connection, time.monotonic() + HEAD_S)
    return Request(link, connection, event) if isinstance(event, h11.Request) else None


def read_event(link: socket.socket, connection: h11.Connection, deadline: float) -> Any:
    """Read the client's next event. Refusal if it is not HTTP, or does not arrive in time."""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            message = f"not an HTTP request: {error}"[:MOST_REASON]
            raise HttpRefusal(error.error_status_hint, message) from None
        if event is not h11.NEED_DATA:
            return event
        if not is_readable(link, deadline - time.monotonic()):
            raise HttpRefusal(408, "timed out waiting for the rest of the request")
        # Of a head, at most its size limit is read at once.
        reading_head = connection.their_state is h11.IDLE
        connection.receive_data(link.recv(MOST_HEAD if reading_head else CHUNK))


def is_readable(
    link: socket.socket, within_s: float | None = None, client: socket.socket | None = None
) -> bool:
    """Wait until `link` has something to read, or for `within_s`; return whether it has.

    ConnectionError if `client`, for whom this is done, has hung up meanwhile.
    """
    poll = select.poll()  # unlike select, it supports descriptors above 1023
    poll.register(link, select.POLLIN)
    if client is not None:
        poll.register(client, 0)  # poll reports a hangup even without requested events
    ready = [number for number, _ in poll.poll(within_s and max(0.0, within_s) * 1000)]
    if client is not None and client.fileno() in ready:
        raise ConnectionResetError("the client has hung up")
    return bool(ready)


def send_response(link: socket.socket, status: int, body: Any) -> None:
    """Send a complete response: bytes as they are, anything else as JSON."""
    kind = "text/plain" if isinstance(body, bytes) else "application/json"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = [("Content-Type", kind), ("Content-Length", str(len(content)))]
    connection = h11.Connection(h11.SERVER)
    response = h11.Response(
        status_code=status, headers=[*headers, ("Connection", "close")], reason=_phrase(status)
    )
    events = (response, h11.Data(data=content), h11.EndOfMessage())
    link.sendall(b"".join(connection.send(event) or b"" for event in events))


def send_refusal(link: socket.socket, refusal: HttpRefusal) -> None:
    """Send the refusal, then read what the client still sends, so that it reads the response."""
    limit = {LIMIT_KEY: True} if isinstance(refusal, LimitRefusal) else {}
    send_response(link, refusal.status, {"message": refusal.message, **limit})
    drain(link)


def drain(link: socket.socket) -> None:
    """Discard incoming bytes until the other side hangs up, for at most LINGER_S."""
    link.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + LINGER_S
    while is_readable(link, max(0.0, deadline - time.monotonic())) and link.recv(CHUNK):
        continue


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""

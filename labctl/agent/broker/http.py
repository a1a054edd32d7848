"""HTTP as accounts speak it to the broker: one request a connection, parsed by h11.

Root reads what anybody may send here, so no parser of our own does. What goes on to the engine is
in relay.py, made anew of what was parsed.
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

from .strict_json import parse_json, parse_query

CHUNK = 256 * 1024
MOST_HEAD = 32 * 1024
MOST_JSON = 1024 * 1024
HEAD_S = 20.0  # for a whole head
IDLE_S = 20.0  # between two pieces of a body
# The same for an image: `docker save` writes a large one to the disk before it sends a byte. An
# account that is silent for so long holds one of its own connections, and nothing of the engine's.
UPLOAD_IDLE_S = 1800.0
LINGER_S = 2.0
MOST_REASON = 300
VERSION = re.compile(r"^/v[0-9]{1,2}\.[0-9]{1,3}(?=/)")
Query = Dict[str, str]


class Refusal(Exception):
    """What the account is told, with HTTP's status, as the engine would tell it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Request:
    """The head of one request, and its body as it comes."""

    def __init__(self, link: socket.socket, connection: h11.Connection, head: h11.Request) -> None:
        names = [name for name, _ in head.headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            # h11 takes the first of them, others the second: what ends where is anybody's guess.
            raise Refusal(400, "a body has either Content-Length or Transfer-Encoding")
        path, _, query = head.target.decode("ascii").partition("?")
        found = VERSION.match(path)
        self.link = link
        self.method = head.method.decode("ascii")
        self.version = found.group() if found else ""
        self.path = path[len(self.version) :]
        try:
            self.query: Query = parse_query(query)
        except ValueError as error:
            raise Refusal(400, f"the query cannot be read: {error}") from None
        self.upgrade = (b"upgrade", b"tcp") in [(name, kind.lower()) for name, kind in head.headers]
        self.is_complete = False
        self._connection = connection

    def blocks(self, most: int, idle_s: float = IDLE_S) -> Iterator[bytes]:
        """The body, at most `most` bytes of it; Refusal where there are more, or none for long."""
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
                    raise Refusal(413, "that is more than the shared server takes")
                yield bytes(event.data)

    def whole(self, most: int = MOST_JSON) -> bytes:
        return b"".join(self.blocks(most))

    def json(self) -> dict[str, Any]:
        """The body as an object; {} where there is none."""
        try:
            found = parse_json(self.whole() or b"{}")
        except ValueError as error:
            raise Refusal(400, f"the body is not valid JSON: {error}") from None
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise Refusal(400, "the body is no object")
        return found

    def send(self, event: h11.Event) -> None:
        """Answer, one event after the other."""
        self.link.sendall(self._connection.send(event) or b"")

    def take_rest(self) -> bytes:
        """Take what came behind the request, once both sides have left HTTP."""
        return self._connection.trailing_data[0]


def read_request(link: socket.socket) -> Request | None:
    """None where the other side hung up without asking for anything."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD)
    event = read_event(link, connection, time.monotonic() + HEAD_S)
    return Request(link, connection, event) if isinstance(event, h11.Request) else None


def read_event(link: socket.socket, connection: h11.Connection, deadline: float) -> Any:
    """Read the client's next event; Refusal where it is not HTTP, or does not come in time."""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            message = f"that is no HTTP request: {error}"[:MOST_REASON]
            raise Refusal(error.error_status_hint, message) from None
        if event is not h11.NEED_DATA:
            return event
        if not is_readable(link, deadline - time.monotonic()):
            raise Refusal(408, "the request has stopped coming")
        # While a head is read no more than it may have is taken at once; a body takes what comes.
        reading_head = connection.their_state is h11.IDLE
        connection.receive_data(link.recv(MOST_HEAD if reading_head else CHUNK))


def is_readable(
    link: socket.socket, within_s: float | None = None, client: socket.socket | None = None
) -> bool:
    """Wait until `link` has something to read, or for `within_s`.

    ConnectionError where `client`, for whom this is done, has hung up meanwhile.
    """
    poll = select.poll()  # unlike select, for descriptors of any number
    poll.register(link, select.POLLIN)
    if client is not None:
        poll.register(client, 0)  # an end is told of all the same
    ready = [number for number, _ in poll.poll(within_s and max(0.0, within_s) * 1000)]
    if client is not None and client.fileno() in ready:
        raise ConnectionResetError("the client has hung up")
    return bool(ready)


def say(link: socket.socket, status: int, body: Any) -> None:
    """One whole answer; bytes go as they are, anything else as JSON."""
    kind = "text/plain" if isinstance(body, bytes) else "application/json"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = [("Content-Type", kind), ("Content-Length", str(len(content)))]
    connection = h11.Connection(h11.SERVER)
    answer = h11.Response(
        status_code=status, headers=[*headers, ("Connection", "close")], reason=_phrase(status)
    )
    events = (answer, h11.Data(data=content), h11.EndOfMessage())
    link.sendall(b"".join(connection.send(event) or b"" for event in events))


def refuse(link: socket.socket, refusal: Refusal) -> None:
    """Tell the account, and hear it out: who is hung up on while sending hears no answer."""
    say(link, refusal.status, {"message": refusal.message})
    linger(link)


def linger(link: socket.socket) -> None:
    """Drop what still comes until the other side hangs up, too, for LINGER_S at most."""
    link.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + LINGER_S
    while is_readable(link, max(0.0, deadline - time.monotonic())) and link.recv(CHUNK):
        continue


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""

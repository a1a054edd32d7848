"""HTTP between an account's docker command, the broker and the engine: one request a connection.

Nothing that a client sends reaches the engine's parser but the bytes of a body whose length is
told, and what follows once the engine has switched to a raw stream. The head is always made anew.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import suppress
from typing import Any, Dict, Iterator
from urllib.parse import urlencode

from .broker_json import parse_json, parse_query

CHUNK = 256 * 1024
MOST_HEAD = 64 * 1024
MOST_JSON = 1024 * 1024
HEAD_S = 20.0
REASONS = {200: "OK", 403: "Forbidden", 404: "Not Found", 409: "Conflict", 500: "Server Error"}
VERSION = re.compile(r"^/v\d{1,2}\.\d{1,3}(?=/)")
Query = Dict[str, str]


class Refusal(Exception):
    """What the account is told, with HTTP's status, as the engine would tell it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Request:
    """The head of one request, and its body as it comes."""

    def __init__(self, link: socket.socket, head: bytes, rest: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise Refusal(400, "that is no HTTP request")
        self.link = link
        self.method, target, self.protocol = words
        path, _, query = target.partition("?")
        found = VERSION.match(path)
        self.version = found.group() if found else ""
        self.path = path[len(self.version) :]
        try:
            self.query: Query = parse_query(query)
        except ValueError as error:
            raise Refusal(400, f"the query cannot be read: {error}") from None
        pairs = (line.partition(":") for line in lines[1:])
        self.headers = {key.strip().lower(): value.strip() for key, _, value in pairs}
        self.upgrade = self.headers.get("upgrade", "").lower() == "tcp"
        self._rest = rest

    def blocks(self, most: int) -> Iterator[bytes]:
        """The body, at most `most` bytes of it; Refusal where there are more."""
        coding = self.headers.get("transfer-encoding", "").lower()
        if coding not in ("", "chunked"):
            raise Refusal(400, "the coding of that body is not known")
        blocks = self._chunked() if coding else self._counted()
        for block in blocks:
            most -= len(block)
            if most < 0:
                raise Refusal(413, "that is more than the shared server takes")
            yield block

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

    def _counted(self) -> Iterator[bytes]:
        text = self.headers.get("content-length", "0")
        if not text.isdigit():
            raise Refusal(400, "the length of that body is no number")
        yield from self._exactly(int(text))

    def _chunked(self) -> Iterator[bytes]:
        while True:
            size = self._line().split(b";")[0]
            try:
                left = int(size, 16)
            except ValueError:
                raise Refusal(400, "that body is not chunked as it says") from None
            if left <= 0:
                while self._line():
                    continue
                return
            yield from self._exactly(left)
            self._line()

    def _line(self) -> bytes:
        while b"\r\n" not in self._rest:
            if len(self._rest) > MOST_HEAD:
                raise Refusal(400, "that line is too long")
            self._rest += self._received()
        found, _, self._rest = self._rest.partition(b"\r\n")
        return found

    def _exactly(self, left: int) -> Iterator[bytes]:
        while left > 0:
            if not self._rest:
                self._rest = self._received()
            block, self._rest = self._rest[:left], self._rest[left:]
            left -= len(block)
            yield block

    def _received(self) -> bytes:
        block = self.link.recv(CHUNK)
        if not block:
            raise Refusal(400, "the request ended before its body")
        return block


def read_request(link: socket.socket) -> Request | None:
    """None where the other side hung up without asking for anything."""
    link.settimeout(HEAD_S)
    said = b""
    while b"\r\n\r\n" not in said[:MOST_HEAD]:
        if len(said) >= MOST_HEAD:
            raise Refusal(400, "the head of that request is too long")
        block = link.recv(CHUNK)
        if not block:
            return None
        said += block
    head, _, rest = said.partition(b"\r\n\r\n")
    return Request(link, head, rest)


def say(link: socket.socket, status: int, body: Any) -> None:
    """One whole answer; bytes go as they are, anything else as JSON."""
    kind = "text/plain" if isinstance(body, bytes) else "application/json"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} {REASONS.get(status, 'Answer')}\r\nContent-Type: {kind}\r\n"
    head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    link.sendall(head.encode() + content)


def pass_on(request: Request, engine: str, path: str, query: Query, body: bytes = b"") -> int:
    """Ask the engine at the socket `engine`, and hand its answer on as it comes; its status.

    Once the engine has switched to a raw stream, and only then, the client's bytes go there too.
    """
    with socket.socket(socket.AF_UNIX) as far:
        far.connect(engine)
        far.sendall(_head(request, path, query, len(body), request.upgrade) + body)
        said = _answer_head(far)
        status = int(said.split(b" ", 2)[1])
        request.link.settimeout(None)
        request.link.sendall(said)
        if status == 101:
            _both_ways(request, far)
        else:
            _stream(far, request.link)
    return status


def send_on(request: Request, engine: str, path: str, query: Query, body: Iterator[bytes]) -> None:
    """The same with a body of unknown length, for a tar that is checked while it passes."""
    with socket.socket(socket.AF_UNIX) as far:
        far.connect(engine)
        head = _head(request, path, query, None, False, "application/x-tar")
        far.sendall(head)
        for block in body:
            if block:
                far.sendall(b"%x\r\n%s\r\n" % (len(block), block))
        far.sendall(b"0\r\n\r\n")
        request.link.settimeout(None)
        _stream(far, request.link)


def _head(
    request: Request,
    path: str,
    query: Query,
    length: int | None,
    upgrade: bool,
    kind: str = "application/json",
) -> bytes:
    asked = f"?{urlencode(query)}" if query else ""
    protocol = "HTTP/1.1" if upgrade or length is None else request.protocol
    lines = [f"{request.method} {request.version}{path}{asked} {protocol}", "Host: docker"]
    lines.append(f"Content-Type: {kind}")
    lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
    # Where the engine does not switch to a stream after all, this connection is over, too.
    lines += ["Connection: Upgrade, close", "Upgrade: tcp"] if upgrade else ["Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode()


def _answer_head(far: socket.socket) -> bytes:
    """The engine's head, and whatever came with it."""
    said = b""
    while b"\r\n\r\n" not in said:
        block = far.recv(CHUNK)
        if not block:
            raise Refusal(500, "the Docker Engine ended while it was asked")
        said += block
    return said


def _both_ways(request: Request, far: socket.socket) -> None:
    def inward() -> None:
        with suppress(OSError):
            if request._rest:
                far.sendall(request._rest)
            _stream(request.link, far)
            far.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=inward, daemon=True)
    sender.start()
    with suppress(OSError):
        _stream(far, request.link)
    with suppress(OSError):
        request.link.shutdown(socket.SHUT_RDWR)
    sender.join()


def _stream(source: socket.socket, target: socket.socket) -> None:
    while True:
        block = source.recv(CHUNK)
        if not block:
            return
        target.sendall(block)

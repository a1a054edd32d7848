"""Pulls from a registry, for all accounts: few at once, of limited size, while there is room.

The engine has no such limits. The broker reads its progress as it passes. If an account hangs up or
exceeds its limit, closing the connection to the engine ends the pull.
"""

from __future__ import annotations

import json
import socket
from typing import Callable, Iterator
from urllib.parse import urlencode

from ...wire.codec import MessageError, decode
from ..host import engine
from ..host.engine_objects import PullDetail, PullProgress
from .concurrency import AccountLimit
from .http import HttpRefusal
from .rules import BrokerAccount

# pulls of one account; the engine itself loads few layers at a time in total
MOST_AT_ONCE = 2
SILENCE_S = 300.0  # the engine reports progress more often, even for a large layer
TICK_S = 1.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


class Pulls:
    """The pulls of all accounts. `require_room` raises Refusal if the disk has no room."""

    def __init__(self, most_bytes: int, require_room: Callable[[], None]) -> None:
        self._most_bytes = most_bytes
        self._require_room = require_room
        self._limit = AccountLimit(MOST_AT_ONCE, f"pulls at most {MOST_AT_ONCE} images")

    def pull(self, account: BrokerAccount, link: socket.socket, reference: str, tag: str) -> None:
        """Pull an image, and send the engine's progress to `link` as the response."""
        query = urlencode({"fromImage": reference, "tag": tag})
        with self._limit.hold(account):
            self._require_room()
            with engine.ResponseStream("POST", f"/images/create?{query}", SILENCE_S) as progress:
                link.settimeout(SILENCE_S)
                link.sendall(HEAD)
                try:
                    for block in self._check_blocks(progress.blocks(TICK_S)):
                        link.sendall(block)
                except (HttpRefusal, engine.EngineRequestError) as refused:
                    # The head has been sent, so the error is another line, as the engine writes it.
                    detail = {"errorDetail": {"message": refused.message}, "error": refused.message}
                    link.sendall(json.dumps(detail).encode() + b"\r\n")

    def _check_blocks(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        size = PullSize()
        for block in blocks:
            self._require_room()
            if size.add(block) > self._most_bytes:
                raise HttpRefusal(413, "the image is larger than the shared server allows")
            yield block


class PullSize:
    """The size of a pull's layers, from the engine's progress lines."""

    def __init__(self) -> None:
        self._layers: dict[str, int] = {}
        self._line = b""

    def add(self, block: bytes) -> int:
        """Add a block of progress; return the bytes known so far."""
        *lines, self._line = (self._line + block).split(b"\n")
        for line in lines:
            layer, size = _read_progress(line)
            self._layers[layer] = max(size, self._layers.get(layer, 0))
        return sum(self._layers.values())


def _read_progress(line: bytes) -> tuple[str, int]:
    """Return (layer, its known bytes); ("", 0) for a line without them."""
    try:
        progress = decode(PullProgress, line or b"{}")
    except MessageError:
        return "", 0
    detail = progress.progressDetail or PullDetail()
    return progress.id or "", max(detail.total or 0, detail.current or 0)

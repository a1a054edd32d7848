"""Images from a registry, for all on the server: few at once, of bounded size, while there is room.

The engine bounds none of this. What it says of its progress is read as it passes; an account that
hangs up, or has used up its bound, has the engine's own pull ended with its connection.
"""

from __future__ import annotations

import json
import socket
from typing import Any, Callable, Iterator
from urllib.parse import urlencode

from ..host import engine
from .concurrency import AccountLimit
from .http import Refusal
from .rules import Account

# Of one account. The engine itself loads few layers at a time, whoever asks.
MOST_AT_ONCE = 2
SILENCE_S = 300.0  # checking or unpacking a large layer is told of more often
TICK_S = 1.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


class Pulls:
    """`require_room` refuses where the disk has no more room for images."""

    def __init__(self, most_bytes: int, require_room: Callable[[], None]) -> None:
        self._most_bytes = most_bytes
        self._require_room = require_room
        self._limit = AccountLimit(MOST_AT_ONCE, f"pulls at most {MOST_AT_ONCE} images")

    def pull(self, account: Account, link: socket.socket, reference: str, tag: str) -> None:
        """The engine's progress goes to `link`, as an answer of its own."""
        query = urlencode({"fromImage": reference, "tag": tag})
        with self._limit.hold(account):
            self._require_room()
            with engine.Stream("POST", f"/images/create?{query}", SILENCE_S) as progress:
                link.settimeout(SILENCE_S)
                link.sendall(HEAD)
                try:
                    for block in self._checked(progress.blocks(TICK_S)):
                        link.sendall(block)
                except (Refusal, engine.Refused) as refused:
                    # The head has been sent: the error is one more line, as the engine writes it.
                    detail = {"errorDetail": {"message": refused.message}, "error": refused.message}
                    link.sendall(json.dumps(detail).encode() + b"\r\n")

    def _checked(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        size = PullSize()
        for block in blocks:
            self._require_room()
            if size.add(block) > self._most_bytes:
                raise Refusal(413, "that image is more than the shared server takes")
            yield block


class PullSize:
    """What the layers of a pull come to, by the engine's own lines of progress."""

    def __init__(self) -> None:
        self._layers: dict[str, int] = {}
        self._line = b""

    def add(self, block: bytes) -> int:
        """The bytes known after the next block of progress."""
        *lines, self._line = (self._line + block).split(b"\n")
        for line in lines:
            layer, size = _read_progress(line)
            self._layers[layer] = max(size, self._layers.get(layer, 0))
        return sum(self._layers.values())


def _read_progress(line: bytes) -> tuple[str, int]:
    """(layer, bytes known of it); nothing for a line that tells of none."""
    try:
        told: dict[str, Any] = json.loads(line or b"{}")
        detail = told.get("progressDetail") or {}
        return str(told.get("id", "")), max(
            int(detail.get("total") or 0), int(detail.get("current") or 0)
        )
    except (ValueError, TypeError, AttributeError):
        return "", 0

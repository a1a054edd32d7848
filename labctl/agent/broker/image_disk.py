"""Room for images: what is free where the engine keeps them, less what uploads will still need."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator

from ..host import engine
from ..host.paths import disk
from .detection import TAKEN
from .http import Refusal

CHECK_BYTES = 4 * 1024 * 1024
ROOT_KEPT_S = 60.0


class ImageDisk:
    """`floor_bytes` of the disk stay free, whatever accounts send."""

    def __init__(self, floor_bytes: int) -> None:
        self._floor_bytes = floor_bytes
        self._claimed_bytes = 0
        self._lock = threading.Lock()
        self._root = Path("/")
        self._root_kept_until_s = 0.0

    def require_room(self) -> None:
        """Refusal where there is none for another image. May be asked for every little while."""
        now_s = time.monotonic()
        if now_s >= self._root_kept_until_s:
            self._root, self._root_kept_until_s = find_image_root(), now_s + ROOT_KEPT_S
        if disk(self._root)[0] - self._claimed_bytes < self._floor_bytes:
            raise Refusal(507, f"{TAKEN}its disk has no room for another image")

    @contextmanager
    def count_upload(self) -> Iterator[Callable[[int], None]]:
        """For as long as an archive comes and is loaded. The function yielded is told of its size,
        bit by bit, and refuses once there is no room left.

        What has come lies on the disk already. The engine needs as much again: it unpacks an
        archive once it has all of it. So that is claimed until then, from other uploads too.
        """
        self.require_room()
        claimed_bytes = checked_bytes = 0

        def claim(size_bytes: int) -> None:
            nonlocal claimed_bytes, checked_bytes
            claimed_bytes += size_bytes
            with self._lock:
                self._claimed_bytes += size_bytes
            if claimed_bytes - checked_bytes >= CHECK_BYTES:
                checked_bytes = claimed_bytes
                self.require_room()

        try:
            yield claim
        finally:
            with self._lock:
                self._claimed_bytes -= claimed_bytes


def find_image_root() -> Path:
    """Where the engine keeps images and what it is sent, by its own account."""
    return Path(json.loads(engine.ask("GET", "/info"))["DockerRootDir"])

"""Room for images: the free bytes of the engine's disk, minus what current uploads still need."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator

from ..host import engine
from ..host.paths import measure_disk
from .http import LimitRefusal

CHECK_BYTES = 4 * 1024 * 1024
ROOT_KEPT_S = 60.0


class ImageDisk:
    """The engine's disk, of which `floor_bytes` stay free."""

    def __init__(self, floor_bytes: int) -> None:
        self._floor_bytes = floor_bytes
        self._claimed_bytes = 0
        self._lock = threading.Lock()
        self._root = Path("/")
        self._root_kept_until_s = 0.0

    def require_room(self) -> None:
        """Raise Refusal if there is no room for another image. Cheap enough for frequent calls."""
        now_s = time.monotonic()
        if now_s >= self._root_kept_until_s:
            self._root, self._root_kept_until_s = find_image_root(), now_s + ROOT_KEPT_S
        if measure_disk(self._root)[0] - self._claimed_bytes < self._floor_bytes:
            raise LimitRefusal(507, "its disk has no room for another image")

    @contextmanager
    def count_upload(self) -> Iterator[Callable[[int], None]]:
        """Claim room while an archive is uploaded and loaded.

        Yields a function to call with each number of bytes; it raises Refusal without room. The
        bytes that have arrived are on the disk already, and the engine needs as many again to
        unpack them. So that much is claimed meanwhile, also against other uploads.
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
    """Return where the engine stores images and uploads."""
    return Path(json.loads(engine.call("GET", "/info"))["DockerRootDir"])

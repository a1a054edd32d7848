"""Connections to the sockets of students' services, read in blocks that suit large answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpcore2

# httpcore reads 64 KiB at a time. What each block passes through costs more than its copies.
BLOCK_BYTES = 256 * 1024
MOST_CONNECTIONS = 100
# the proxy's failures on the way to a service; httpcore has no common base class
FAILURES = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.TimeoutException,
    httpcore2.UnsupportedProtocol,
)


def make_pool(path: str) -> httpcore2.AsyncConnectionPool:
    """Return a pool of connections to the service at this socket."""
    return httpcore2.AsyncConnectionPool(
        uds=path, max_connections=MOST_CONNECTIONS, network_backend=BlockBackend()
    )


class BlockBackend(httpcore2.AsyncNetworkBackend):
    """Opens sockets that are read in blocks of BLOCK_BYTES."""

    def __init__(self) -> None:
        self._backend = httpcore2.AnyIOBackend()

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore2.AsyncNetworkStream:
        return BlockStream(await self._backend.connect_unix_socket(path, timeout, socket_options))


class BlockStream(httpcore2.AsyncNetworkStream):
    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(max(max_bytes, BLOCK_BYTES), timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

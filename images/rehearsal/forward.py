#!/usr/bin/python3
"""Forwards connections to the metadata service and to the cloud's API to the rehearsal.

The rehearsal listens on two Unix sockets that are mounted here, so that it is not open on any
network. 169.254.169.254 is on this machine's loopback. The API has the same address and port as
outside, 127.0.0.1, so that one AWS_ENDPOINT_URL works in both places.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

IMDS = ("169.254.169.254", 80, "/rehearsal/machine/imds.sock")
API = ("127.0.0.1", int(os.environ["REHEARSAL_API_PORT"]), "/rehearsal/api/api.sock")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()


async def serve(host: str, port: int, path: str) -> None:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            socket_reader, socket_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, socket_writer), pump(socket_reader, writer))
        socket_writer.close()
        writer.close()

    server = await asyncio.start_server(forward, host, port)
    await server.serve_forever()


async def serve_all() -> None:
    await asyncio.gather(serve(*IMDS), serve(*API))


asyncio.run(serve_all())

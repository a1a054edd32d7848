#!/usr/bin/python3
"""Carries what is sent to the metadata service and to the cloud's API out to the rehearsal.

The rehearsal listens on two Unix sockets that are mounted here, so that nothing of it is open on
a network. 169.254.169.254 is on this machine's loopback; the API is at the same address and port
as outside, 127.0.0.1, so that one AWS_ENDPOINT_URL is right in both places.
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
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        far_writer.close()
        writer.close()

    server = await asyncio.start_server(carry, host, port)
    await server.serve_forever()


async def everything() -> None:
    await asyncio.gather(serve(*IMDS), serve(*API))


asyncio.run(everything())

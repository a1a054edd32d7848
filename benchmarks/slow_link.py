"""A slow way to a server: a TCP proxy that lets few bytes per second pass in each direction.

`python slow_link.py PORT BYTES_PER_S` prints the port it listens on and runs until it is ended.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from benchmarks.boxes import Box, Boxes, describe

BLOCK_BYTES = 16 * 1024


@contextmanager
def slow_link(made: Boxes, box: Box, bytes_per_s: float) -> Iterator[tuple[Boxes, Box]]:
    """Yield the same server behind a slow link, with ssh_configs of its own."""
    words = (sys.executable, "-m", __name__, str(box.endpoint.port), str(bytes_per_s))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            slow = Box(box.name, msgspec.structs.replace(box.endpoint, port=port))
            home = made.home / "slow"
            (home / ".ssh").mkdir(parents=True)
            behind = replace(made, home=home, all=(slow,))
            describe(behind)
            yield behind, slow
            behind.end_masters()
        finally:
            process.terminate()


async def _serve(port: int, bytes_per_s: float) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(
                _pass_on(reader, there[1], bytes_per_s), _pass_on(there[0], writer, bytes_per_s)
            )
        except OSError:
            pass  # one side has closed the connection
        finally:
            writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0, limit=BLOCK_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float
) -> None:
    """Pass everything on; a pause is not made up for by more speed later."""
    due_s = time.monotonic()
    while block := await reader.read(BLOCK_BYTES):
        writer.write(block)
        await writer.drain()
        due_s = max(due_s, time.monotonic()) + len(block) / bytes_per_s
        await asyncio.sleep(due_s - time.monotonic())
    writer.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))

"""Dynamic batching: while the model works, images gather; when it is free, it gets them together.

So a lone request waits for nobody, and under load batches grow by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from PIL.Image import Image

from .refusals import RefusedError

Row = list[float]
Rows = Callable[[list[Image]], list[Row]]


@dataclass(frozen=True)
class _Waiting:
    image: Image
    answer: asyncio.Future[Row]


class Batcher:
    """Hands images to `rows` in batches, from one thread. Used within one event loop.

    `on_batch` hears of each batch: how many images, how many seconds.
    """

    def __init__(
        self,
        rows: Rows,
        on_batch: Callable[[int, float], None],
        *,
        max_batch: int,
        max_waiting: int,
        wait_s: float = 0.0,
    ) -> None:
        self._rows = rows
        self._on_batch = on_batch
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "model")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Images that the model has not begun with."""
        return self._queue.qsize()

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """End; images that still wait are refused."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        while not self._queue.empty():
            _settle(self._queue.get_nowait(), RefusedError(503, "stopping", "the server stops"))
        self._thread.shutdown(wait=False)

    async def answers(self, images: list[Image]) -> list[Row]:
        """A row for each image, in their order.

        RefusedError (busy) where too many wait already; what the model raises comes through.
        """
        if self.waiting + len(images) > self._max_waiting:
            text = f"{self.waiting} images are waiting; try again in a second"
            raise RefusedError(503, "busy", text)
        loop = asyncio.get_running_loop()
        placed = [_Waiting(one, loop.create_future()) for one in images]
        for one in placed:
            self._queue.put_nowait(one)
        # Every one of them is heard, also where several failed.
        found = await asyncio.gather(*(one.answer for one in placed), return_exceptions=True)
        rows = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            rows.append(each)
        return rows

    async def _work(self) -> None:
        while True:
            batch = [await self._queue.get()]
            if self._wait_s:
                await self._gather(batch)
            while len(batch) < self._max_batch and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            # Whoever has gone meanwhile needs no answer.
            wanted = [one for one in batch if not one.answer.done()]
            if wanted:
                await self._answer(wanted)

    async def _gather(self, batch: list[_Waiting]) -> None:
        """More images for a batch, until it is full or has waited long enough."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_s
        with suppress(asyncio.TimeoutError):
            while len(batch) < self._max_batch:
                left = until - loop.time()
                batch.append(await asyncio.wait_for(self._queue.get(), left))

    async def _answer(self, batch: list[_Waiting]) -> None:
        found = await self._run([one.image for one in batch])
        if isinstance(found, BaseException) and len(batch) > 1:
            # One odd image must not cost the others their answers.
            for one in batch:
                alone = await self._run([one.image])
                _settle(one, alone if isinstance(alone, BaseException) else alone[0])
            return
        for number, one in enumerate(batch):
            _settle(one, found if isinstance(found, BaseException) else found[number])

    async def _run(self, images: list[Image]) -> list[Row] | BaseException:
        """What the model says; or what it raised, which may be anything: it is foreign code."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        done = loop.run_in_executor(self._thread, self._rows, images)
        await asyncio.wait([done])
        self._on_batch(len(images), loop.time() - begun)
        return done.exception() or done.result()


def _settle(one: _Waiting, found: Row | BaseException) -> None:
    if one.answer.done():
        return
    if isinstance(found, BaseException):
        one.answer.set_exception(found)
    else:
        one.answer.set_result(found)

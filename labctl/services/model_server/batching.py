"""Dynamic batching: items that arrive while the model is busy form its next batch.

An item is an image, or a row of a table.

A single request never waits for others, and under load batches grow by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from .refusals import RefusedError

Row = list[float]
Item = Image | Row
Predict = Callable[[list[Any]], list[Row]]


@dataclass(frozen=True)
class _QueuedItem:
    item: Item
    answer: asyncio.Future[Row]


class Batcher:
    """Passes items to `predict` in batches, from one thread. For use in one event loop.

    `on_batch` is called after each batch with its number of items and its seconds.
    """

    def __init__(
        self,
        predict: Predict,
        on_batch: Callable[[int, float], None],
        *,
        max_batch: int,
        max_waiting: int,
        wait_s: float = 0.0,
    ) -> None:
        self._predict = predict
        self._on_batch = on_batch
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._queue: asyncio.Queue[_QueuedItem] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "model")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Number of items that the model has not started on."""
        return self._queue.qsize()

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Stop; items that are still waiting are refused."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        while not self._queue.empty():
            _settle(
                self._queue.get_nowait(), RefusedError(503, "stopping", "the server is stopping")
            )
        self._thread.shutdown(wait=False)

    async def predict(self, items: Sequence[Item]) -> list[Row]:
        """Compute a row of probabilities for each item, in their order.

        RefusedError (busy) if too many items are waiting; raises the model's own errors.
        """
        if self.waiting + len(items) > self._max_waiting:
            text = f"{self.waiting} items are waiting; try again in a second"
            raise RefusedError(503, "busy", text)
        loop = asyncio.get_running_loop()
        queued = [_QueuedItem(item, loop.create_future()) for item in items]
        for waiting in queued:
            self._queue.put_nowait(waiting)
        # Collects every result, also if several failed.
        results = await asyncio.gather(
            *(waiting.answer for waiting in queued), return_exceptions=True
        )
        rows = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            rows.append(result)
        return rows

    async def _work(self) -> None:
        while True:
            batch = [await self._queue.get()]
            if self._wait_s:
                await self._gather(batch)
            while len(batch) < self._max_batch and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            # A client that has disconnected meanwhile needs no answer.
            open_requests = [waiting for waiting in batch if not waiting.answer.done()]
            if open_requests:
                await self._answer(open_requests)

    async def _gather(self, batch: list[_QueuedItem]) -> None:
        """Add images to a batch until it is full or has waited long enough."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_s
        with suppress(asyncio.TimeoutError):
            while len(batch) < self._max_batch:
                left_s = until - loop.time()
                batch.append(await asyncio.wait_for(self._queue.get(), left_s))

    async def _answer(self, batch: list[_QueuedItem]) -> None:
        result = await self._run([waiting.item for waiting in batch])
        if isinstance(result, BaseException) and len(batch) > 1:
            # One bad item must not cost the others their answers.
            for waiting in batch:
                single = await self._run([waiting.item])
                _settle(waiting, single if isinstance(single, BaseException) else single[0])
            return
        for number, waiting in enumerate(batch):
            _settle(waiting, result if isinstance(result, BaseException) else result[number])

    async def _run(self, items: list[Item]) -> list[Row] | BaseException:
        """Return the model's rows, or the exception that it raised, of any kind: foreign code."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        done = loop.run_in_executor(self._thread, self._predict, items)
        await asyncio.wait([done])
        self._on_batch(len(items), loop.time() - started_s)
        return done.exception() or done.result()


def _settle(waiting: _QueuedItem, result: Row | BaseException) -> None:
    if waiting.answer.done():
        return
    if isinstance(result, BaseException):
        waiting.answer.set_exception(result)
    else:
        waiting.answer.set_result(result)

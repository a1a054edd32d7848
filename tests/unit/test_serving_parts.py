"""Batches, drift and settings of labctl's server for models."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from labctl.services.model_server.batching import Batcher
from labctl.services.model_server.drift import AT_LEAST, WINDOW, DriftMonitor, stability_index
from labctl.services.model_server.refusals import RefusedError
from labctl.services.model_server.settings import ServeSettings, SettingError, read_environment

COUNTS = st.lists(st.integers(0, 1000), min_size=2, max_size=20).filter(any)


class Gate:
    """A model that answers an image with its width, when it is let go on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def rows(self, images: list[Image.Image]) -> list[list[float]]:
        widths = [one.width for one in images]
        self.batches.append(widths)
        self.begun.release()
        assert self.go_on.acquire(timeout=60)
        if 13 in widths:
            raise ValueError("13")
        return [[float(width)] for width in widths]


def images(*widths: int) -> list[Image.Image]:
    return [Image.new("L", (width, 1)) for width in widths]


def tried(
    gate: Gate, work: Callable[[Batcher], Coroutine[Any, Any, None]], **options: Any
) -> list[int]:
    """Run `work` with a batcher; the sizes of the batches that were told."""
    sizes: list[int] = []

    async def main() -> None:
        wanted = {"max_batch": 4, "max_waiting": 10, **options}
        batcher = Batcher(gate.rows, lambda size, _: sizes.append(size), **wanted)
        batcher.start()
        try:
            await work(batcher)
        finally:
            await batcher.close()

    asyncio.run(main())
    return sizes


async def begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.begun.acquire, timeout=60)


def test_images_gather_while_the_model_works_and_are_answered_in_order() -> None:
    gate = Gate()

    async def work(batcher: Batcher) -> None:
        first = asyncio.ensure_future(batcher.predict(images(1)))
        await begun(gate)
        rest = [asyncio.ensure_future(batcher.predict(images(*w))) for w in ((2, 3), (4,), (5, 6))]
        while batcher.waiting < 5:
            await asyncio.sleep(0)
        gate.go_on.release(3)
        assert await first == [[1.0]]
        assert [await one for one in rest] == [[[2.0], [3.0]], [[4.0]], [[5.0], [6.0]]]

    assert tried(gate, work) == [1, 4, 1]
    assert gate.batches == [[1], [2, 3, 4, 5], [6]]


def test_a_batch_of_one_is_no_batching() -> None:
    gate = Gate()
    gate.go_on.release(3)

    async def work(batcher: Batcher) -> None:
        assert await batcher.predict(images(1, 2, 3)) == [[1.0], [2.0], [3.0]]

    assert tried(gate, work, max_batch=1) == [1, 1, 1]


def test_a_batch_that_waits_is_begun_when_it_is_full() -> None:
    gate = Gate()
    gate.go_on.release(2)

    async def work(batcher: Batcher) -> None:
        halves = [batcher.predict(images(1, 2)), batcher.predict(images(3, 4))]
        assert await asyncio.gather(*halves) == [[[1.0], [2.0]], [[3.0], [4.0]]]

    assert tried(gate, work, wait_s=60.0) == [4]


def test_one_odd_image_costs_the_others_nothing() -> None:
    gate = Gate()

    async def work(batcher: Batcher) -> None:
        first = asyncio.ensure_future(batcher.predict(images(1)))
        await begun(gate)
        good, bad = (asyncio.ensure_future(batcher.predict(images(w))) for w in (2, 13))
        while batcher.waiting < 2:
            await asyncio.sleep(0)
        gate.go_on.release(4)
        assert await first == [[1.0]]
        assert await good == [[2.0]]
        with pytest.raises(ValueError, match="13"):
            await bad

    assert tried(gate, work) == [1, 2, 1, 1]


def test_more_than_may_wait_is_refused_and_so_is_what_waits_at_the_end() -> None:
    gate = Gate()

    async def work(batcher: Batcher) -> None:
        first = asyncio.ensure_future(batcher.predict(images(1)))
        await begun(gate)
        second = asyncio.ensure_future(batcher.predict(images(*range(1, 11))))
        while batcher.waiting < 10:
            await asyncio.sleep(0)
        with pytest.raises(RefusedError) as refused:
            await batcher.predict(images(1))
        assert (refused.value.status, refused.value.reason) == (503, "busy")
        await batcher.close()
        gate.go_on.release()
        with pytest.raises(RefusedError) as stopping:
            await second
        assert stopping.value.reason == "stopping"
        first.cancel()

    tried(gate, work)


@given(COUNTS)
def test_the_same_shares_have_no_drift(counts: list[int]) -> None:
    assert stability_index(counts, counts) == pytest.approx(0, abs=1e-12)


@given(st.data())
def test_the_index_is_symmetric_finite_and_never_negative(data: st.DataObject) -> None:
    one = data.draw(COUNTS)
    row = st.lists(st.integers(0, 1000), min_size=len(one), max_size=len(one))
    other = data.draw(row.filter(any))
    index = stability_index(one, other)
    assert 0 <= index < math.inf
    assert index == pytest.approx(stability_index(other, one))


def test_the_index_of_a_case_worked_by_hand() -> None:
    # Shares 0.25 and 0.75 against 0.5 and 0.5; counts so large that the added halves do not show.
    by_hand = -0.25 * math.log(0.5) + 0.25 * math.log(1.5)
    many = 10**9
    assert stability_index([many, 3 * many], [many, many]) == pytest.approx(by_hand)


def test_only_the_last_predictions_count() -> None:
    watch = DriftMonitor([1000, 1000])
    for _ in range(WINDOW):
        watch.count(0)
    for number in range(WINDOW):
        watch.count(number % 2)
    drift = watch.measure()
    assert drift is not None
    assert (drift.index, drift.predictions) == (pytest.approx(0, abs=1e-9), WINDOW)
    assert drift.by_chance == pytest.approx(1 / WINDOW + 1 / 2000)


def test_few_predictions_say_nothing() -> None:
    watch = DriftMonitor([1, 1])
    for _ in range(AT_LEAST - 1):
        watch.count(1)
    assert watch.measure() is None


def test_settings_come_from_the_environment_and_nonsense_is_named() -> None:
    found = read_environment(
        {"LABCTL_SERVE_MAX_BATCH": "8", "LABCTL_SERVE_WAIT_MS": "2.5", "X": ""}
    )
    assert (found.max_batch, found.wait_ms) == (8, 2.5)
    assert found.max_pixels == ServeSettings().max_pixels
    for name, text in (
        ("MAX_BATCH", "many"), ("MAX_BATCH", "0"), ("MAX_IMAGES", "-1"), ("WAIT_MS", "nan"),
        ("MAX_BACTH", "8"), ("PORT", ""),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=f"LABCTL_SERVE_{name}"):
            read_environment({f"LABCTL_SERVE_{name}": text})

"""The loop of keepers: what comes when, how often, and what is reported of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from labctl.errors import CapacityError
from labctl.keeper.scheduler import Scheduler, Task


class Loop:
    """A scheduler whose ticks the test makes; it keeps what is reported and every pause."""

    def __init__(self, at_once: int = 8) -> None:
        self.reports: list[tuple[str, str]] = []
        self.pauses: list[float] = []
        self.scheduler = Scheduler(
            lambda name, text: self.reports.append((name, text)),
            at_once=at_once,
            on_done=lambda task, error, pause_s: self.pauses.append(pause_s),
        )

    def add(self, name: str, run: Callable[[], float | None]) -> None:
        self.scheduler.add(Task(name, run, every_s=10.0, longest_pause_s=60.0))

    def tick(self) -> int:
        """One tick, to the end of what it starts; how many tasks ran."""
        threads = self.scheduler.start_due_tasks()
        for thread in threads:
            thread.join()
        return len(threads)


def fail() -> None:
    raise CapacityError("no machine left", why="in\nany zone", hint="labctl offers")


def test_a_task_runs_when_it_is_due() -> None:
    loop = Loop()
    loop.add("first", lambda: None)
    assert (loop.tick(), loop.tick()) == (1, 0)
    assert 9 <= loop.pauses[0] <= 11
    loop.scheduler.make_all_due()
    assert loop.tick() == 1


def test_a_task_may_say_when_it_comes_again() -> None:
    loop = Loop()
    loop.add("first", lambda: 100.0)
    loop.tick()
    assert 90 <= loop.pauses[0] <= 110


def test_a_failing_task_comes_ever_more_rarely_and_is_reported_once() -> None:
    loop = Loop()
    loop.add("first", fail)
    for _ in range(5):
        loop.scheduler.make_all_due()
        loop.tick()
    expected = (10.0, 20.0, 40.0, 60.0, 60.0)
    for pause_s, nominal_s in zip(loop.pauses, expected, strict=True):
        assert 0.9 * nominal_s <= pause_s <= 1.1 * nominal_s
    ((name, text),) = loop.reports
    assert name == "first"
    assert text.startswith("no machine left: in; any zone; trying again in ")
    assert text.endswith(" s\n  next: labctl offers")


def test_after_a_success_the_pause_begins_anew() -> None:
    loop = Loop()
    outcomes = [fail, fail, lambda: None, fail]
    loop.add("first", lambda: outcomes.pop(0)())
    for _ in range(4):
        loop.scheduler.make_all_due()
        loop.tick()
    assert loop.reports[1] == ("first", "working again")
    assert loop.pauses[3] <= 11
    assert len(loop.reports) == 3


def test_an_error_that_nobody_expected_stops_neither_its_task_nor_another() -> None:
    loop = Loop()
    ran = []

    def broken() -> None:
        raise ZeroDivisionError

    loop.add("broken", broken)
    loop.add("other", lambda: ran.append("other"))
    for _ in range(2):
        loop.scheduler.make_all_due()
        assert loop.tick() == 2
    assert ran == ["other", "other"]
    assert any("ZeroDivisionError" in text for name, text in loop.reports if name == "broken")


def test_a_task_never_runs_twice_at_a_time_and_few_run_at_once() -> None:
    loop = Loop(at_once=2)
    go_on = threading.Event()
    for name in ("first", "second", "third"):
        loop.add(name, lambda: float(go_on.wait(60)))
    threads = loop.scheduler.start_due_tasks()
    assert len(threads) == 2
    loop.scheduler.make_all_due()
    assert loop.scheduler.start_due_tasks() == []
    go_on.set()
    for thread in threads:
        thread.join()
    loop.scheduler.make_all_due()
    assert loop.tick() == 2


def test_a_removed_task_comes_no_more() -> None:
    loop = Loop()
    loop.add("first", lambda: None)
    loop.scheduler.remove("first")
    loop.scheduler.remove("never added")
    assert loop.tick() == 0


def test_run_ends_when_stop_is_set() -> None:
    loop = Loop()
    ticks = []
    loop.add("first", lambda: loop.scheduler.stop.set())
    loop.scheduler.run(before_tick=lambda: ticks.append("tick"))
    assert ticks == ["tick"]

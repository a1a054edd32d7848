"""Parts side by side: their order, the first error, and how all of them end."""

from __future__ import annotations

import _thread
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.errors import LabError, PolicyError
from labctl.parallel import (
    CanceledError,
    call_in_caller,
    is_canceled,
    on_cancel,
    run_parts,
    wait_for,
)
from labctl.state.locks import hold_lock

LONG_S = 30.0


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def wait_for_cancel() -> None:
    ended = threading.Event()
    with on_cancel(ended.set):
        assert ended.wait(LONG_S)
    raise LabError("cut off")


def test_parts_run_at_the_same_time_and_results_keep_their_names() -> None:
    both = threading.Barrier(2, timeout=LONG_S)

    def meet(value: int) -> int:
        both.wait()
        return value

    assert run_parts({"a": lambda: meet(1), "b": lambda: meet(2)}) == {"a": 1, "b": 2}


def test_a_part_waits_for_another_one_alone() -> None:
    order: list[str] = []
    built = threading.Event()

    def build() -> None:
        wait_for("code")
        order.append("image")
        built.set()

    def push_data() -> None:
        assert built.wait(LONG_S), "the build does not wait for the data"
        order.append("data")

    run_parts({"code": lambda: order.append("code"), "data": push_data, "image": build})
    assert order == ["code", "image", "data"]


def test_an_error_cancels_the_others_and_all_have_ended_when_it_is_raised() -> None:
    ended: list[str] = []

    def last() -> None:
        try:
            wait_for_cancel()
        finally:
            time.sleep(0.05)
            ended.append("last")

    def fail() -> None:
        raise PolicyError("edited on the server")

    def never() -> None:
        wait_for("fails")
        ended.append("never")

    with pytest.raises(PolicyError, match="edited on the server"):
        run_parts({"last": last, "never": never, "fails": fail})
    assert ended == ["last"]


def test_what_cannot_be_ended_hides_no_error_and_keeps_no_other_part() -> None:
    """The channel of a lost connection cannot be closed, and the other parts still wait."""
    waiting = threading.Barrier(3, timeout=LONG_S)
    ended = threading.Event()

    def close() -> None:
        raise EOFError

    def wait(end: Callable[[], object]) -> None:
        with on_cancel(end):
            waiting.wait()
            assert ended.wait(LONG_S)
        raise LabError("cut off")

    def fail() -> None:
        waiting.wait()
        raise PolicyError("refused")

    started_s = time.monotonic()
    with pytest.raises(PolicyError, match="refused"):
        run_parts({"dead": lambda: wait(close), "open": lambda: wait(ended.set), "code": fail})
    assert time.monotonic() - started_s < LONG_S / 2


def test_of_several_errors_the_earliest_part_decides() -> None:
    def fail(name: str) -> None:
        raise LabError(name)

    def first() -> None:
        # Holds the calling thread, so that it finds both errors at once.
        call_in_caller(lambda: time.sleep(0.2))
        fail("first")

    for _ in range(5):
        with pytest.raises(LabError, match="first"):
            run_parts({"first": lambda: fail("first"), "second": lambda: wait_for("first")})
    with pytest.raises(LabError, match="second"):
        run_parts({"first": first, "second": lambda: fail("second")})


def test_an_interrupt_ends_a_process_that_a_part_waits_for() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def part() -> None:
        with subprocess.Popen(["sleep", str(LONG_S)]) as process, on_cancel(process.kill):
            started.append(process)
            process.wait()

    def interrupt() -> None:
        wait_until(lambda: started)
        _thread.interrupt_main()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_parts({"part": part, "interrupt": interrupt})
    assert time.monotonic() - began < LONG_S / 2
    assert started[0].returncode == -9


def test_a_canceled_part_starts_nothing_more() -> None:
    results: list[str] = []

    def part() -> None:
        wait_until(is_canceled)
        try:
            with on_cancel(lambda: None):
                results.append("started")
        except CanceledError:
            results.append("canceled")

    def fail() -> None:
        raise LabError("stop")

    with pytest.raises(LabError, match="stop"):
        run_parts({"part": part, "fail": fail})
    assert results == ["canceled"]


def test_a_part_that_waits_for_a_lock_can_be_canceled(tmp_path: Path) -> None:
    waiting = threading.Event()

    def part() -> None:
        wait = {"wait_s": LONG_S, "on_wait": lambda holder: waiting.set()}
        with hold_lock(tmp_path / "lock", "push", **wait):  # type: ignore[arg-type]
            raise AssertionError("it is not free")

    def fail() -> None:
        assert waiting.wait(LONG_S)
        raise LabError("stop")

    began = time.monotonic()
    lock = hold_lock(tmp_path / "lock", "pull", wait_s=1)
    with lock, pytest.raises(LabError, match="stop"):
        run_parts({"part": part, "fail": fail})
    assert time.monotonic() - began < LONG_S / 2


def test_questions_are_asked_in_the_thread_that_can_be_interrupted() -> None:
    main = threading.current_thread()
    nested = {"inner": lambda: call_in_caller(threading.current_thread)}
    answers = run_parts({"outer": lambda: run_parts(nested)["inner"]})
    assert answers == {"outer": main}

    def interrupt() -> None:
        raise KeyboardInterrupt

    ended: list[str] = []

    def other() -> None:
        try:
            wait_for_cancel()
        finally:
            ended.append("other")

    with pytest.raises(KeyboardInterrupt):
        run_parts({"asks": lambda: call_in_caller(interrupt), "other": other})
    assert ended == ["other"]


def test_a_question_that_is_not_asked_any_more_ends_its_part() -> None:
    asked: list[str] = []

    def fail() -> None:
        raise LabError("stop")

    def hold() -> None:
        call_in_caller(lambda: time.sleep(0.1))
        fail()

    for _ in range(5):
        with pytest.raises(LabError, match="stop"):
            run_parts({"a": hold, "b": fail, "c": lambda: wait_until(is_canceled) or ask(asked)})
    assert asked == []


def ask(asked: list[str]) -> None:
    call_in_caller(lambda: asked.append("asked"))


def test_parts_inside_of_a_part_end_with_it() -> None:
    ended: list[str] = []

    def inner() -> None:
        try:
            wait_for_cancel()
        finally:
            ended.append("inner")

    def fail() -> None:
        time.sleep(0.05)
        raise LabError("stop")

    with pytest.raises(LabError, match="stop"):
        run_parts({"outer": lambda: run_parts({"inner": inner}), "fail": fail})
    assert ended == ["inner"]


def test_outside_of_parts_nothing_is_canceled() -> None:
    with on_cancel(lambda: pytest.fail("not canceled")):
        assert not is_canceled()
    assert call_in_caller(threading.current_thread) is threading.current_thread()
    with pytest.raises(RuntimeError):
        wait_for("code")

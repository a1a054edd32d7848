"""The line while a followed run prints nothing, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from labctl.cli import log_silence, screen
from labctl.cli.log_silence import FIRST, NEXT, LogSilenceLine, describe_activity
from labctl.cli.screen import Screen
from labctl.errors import ConnectError
from labctl.events import Note, Progress, RepeatedNote, Step, UniqueNote, report_wait
from labctl.insight.top import ContainerMetrics, GpuMetrics, ServerMetrics


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(text: str, stderr: io.StringIO) -> None:
    deadline = time.monotonic() + 20
    while text not in stderr.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)


def show(
    monkeypatch: pytest.MonkeyPatch,
    stderr: io.StringIO,
    describe: Callable[[str], str] = lambda run_id: "",
    expected: str = FIRST,
) -> tuple[str, list[bytes]]:
    """Wait for the first output of a run for a moment; return what was drawn, and the log."""
    monkeypatch.setattr(screen, "WAIT_DELAY_S", 0.01)
    monkeypatch.setattr(log_silence, "EVERY_S", 0.05)
    monkeypatch.setattr(log_silence, "POLL_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr)
    log: list[bytes] = []
    line = LogSilenceLine(drawn := Screen(), describe)
    on_log = line.watch_log(log.append)
    line.start("night")
    if stderr.isatty():
        wait_for(expected, stderr)
    on_log(b"epoch 1\n")
    assert drawn.live is None
    line.stop()
    return stderr.getvalue(), log


def test_a_terminal_shows_that_the_run_has_no_output_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, log = show(monkeypatch, Terminal())
    assert FIRST in drawn
    assert "0:00:0" in drawn
    assert log == [b"epoch 1\n"]


def test_it_shows_what_the_run_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, _ = show(monkeypatch, Terminal(), lambda run_id: f"{run_id} uses 0.9", "night uses 0.9")
    assert f"{FIRST}: night uses 0.9" in drawn


@contextmanager
def follow_log(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Screen, Terminal, Callable[[bytes], None]]]:
    """Follow a run's log on a terminal; return what draws, the terminal, and what takes the log."""
    monkeypatch.setattr(log_silence, "EVERY_S", 0.05)
    monkeypatch.setattr(log_silence, "POLL_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    line = LogSilenceLine(drawn := Screen(), lambda run_id: "1.9 cores busy")
    on_log = line.watch_log(lambda block: None)
    line.start("night")
    try:
        yield drawn, stderr, on_log
    finally:
        line.stop()


def test_the_clock_counts_from_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with follow_log(monkeypatch) as (_, stderr, on_log):
        on_log(b"epoch 1\n")
        monkeypatch.setattr(log_silence, "EVERY_S", 3.0)
        wait_for(NEXT, stderr)
    assert re.search(rf"{NEXT}[^\r]*0:00:03", stderr.getvalue())
    assert "0:00:00" not in stderr.getvalue()


def test_the_clock_of_a_wait_counts_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "WAIT_DELAY_S", 2.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    with report_wait(Screen(), "removing digits"):
        wait_for("removing digits", stderr)
    assert "0:00:02" in stderr.getvalue()


def test_a_log_that_falls_silent_again_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with follow_log(monkeypatch) as (drawn, stderr, on_log):
        for number in range(2):
            on_log(f"epoch {number}\n".encode())
            assert not drawn.bars
            stderr.truncate(0)
            wait_for(f"{NEXT}: 1.9 cores busy", stderr)
        on_log(b"epoch 2\n")
        assert not drawn.bars


def test_nothing_is_drawn_into_a_line_that_the_run_has_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with follow_log(monkeypatch) as (drawn, stderr, on_log):
        on_log(b"epoch 1:  40%")
        time.sleep(0.3)
        assert not drawn.bars
        on_log(b"\repoch 1: 100%\n")
        wait_for(NEXT, stderr)


def test_a_run_that_is_followed_again_is_not_said_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_silence, "EVERY_S", 0.05)
    monkeypatch.setattr(log_silence, "POLL_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    line = LogSilenceLine(Screen(), lambda run_id: "1.9 cores busy", detail="")
    line.start("night")
    wait_for("1.9 cores busy", stderr)
    line.stop()
    assert "its container is starting" not in stderr.getvalue()


def test_a_run_without_a_container_is_about_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, _ = show(monkeypatch, Terminal(), lambda run_id: "", "container is starting")
    assert f"{FIRST}: its container is starting" in drawn


def test_a_server_that_does_not_answer_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(run_id: str) -> str:
        measured.append(run_id)
        raise ConnectError("no route")

    measured: list[str] = []
    monkeypatch.setattr(log_silence, "EVERY_S", 0.0)
    monkeypatch.setattr(log_silence, "LONG_EVERY_S", 0.0)
    LogSilenceLine(Screen(), fail)._measure("night")
    assert measured == ["night"]


def test_elsewhere_nothing_is_shown_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    describe = lambda run_id: measured.append(run_id) or ""  # type: ignore[func-returns-value]  # noqa: E731
    assert show(monkeypatch, io.StringIO(), describe) == ("", [b"epoch 1\n"])
    assert measured == []


def test_an_activity_names_what_was_measured() -> None:
    run = ContainerMetrics(
        name="c", run="night", lab_id="0f1e", cpu_cores=0.94, memory_bytes=120 * 1024**2,
        gpus=("GPU-1",),
    )  # fmt: skip
    card = GpuMetrics(uuid="GPU-1", use_percent=35.0)
    now = ServerMetrics(at=0.0, cores=4, gpus=(card,), runs=(run,))
    text = "0.9 cores busy, 120 MiB memory, GPU 35% busy"
    assert describe_activity(now, "0f1e", "night") == text
    assert describe_activity(now, "0f1e", "other") == ""


def test_a_wait_is_shown_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "WAIT_DELAY_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    drawn = Screen()
    with report_wait(drawn, "removing digits", "at most 5 min"):
        wait_for("removing digits: at most 5 min", stderr)
    assert "removing digits: at most 5 min" in stderr.getvalue()
    assert (drawn.live, drawn.waits) == (None, {})
    assert "✓" not in stderr.getvalue()


def test_a_wait_within_another_one_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "WAIT_DELAY_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    drawn = Screen()
    with report_wait(drawn, "removing digits"):
        wait_for("removing digits", stderr)
        with report_wait(drawn, "connecting to gpu1"):
            drawn.waits["connecting to gpu1"].join(10)
            assert list(drawn.bars) == ["removing digits"]


def test_several_short_waits_in_a_row_are_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "WAIT_DELAY_S", 0.3)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    drawn = Screen()
    deadline = time.monotonic() + 20
    while "reading" not in stderr.getvalue() and time.monotonic() < deadline:
        with report_wait(drawn, "reading"):
            time.sleep(0.05)
    assert "reading" in stderr.getvalue()


def test_a_step_takes_the_place_of_the_wait_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "WAIT_DELAY_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    drawn = Screen()
    with report_wait(drawn, "starting the run"):
        wait_for("starting the run", stderr)
        drawn.waits["starting the run"].join(10)
        drawn.emit(Step(name="sending data"))
        assert list(drawn.bars) == ["sending data"]
        drawn.emit(Step(name="sending data", done=True))
    assert (drawn.live, drawn.bars, drawn.waits) == (None, {}, {})


def test_a_short_wait_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    with report_wait(Screen(), "removing digits"):
        pass
    assert stderr.getvalue() == ""


def test_without_a_terminal_a_long_wait_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "PLAIN_WAIT_DELAY_S", 0.01)
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    drawn = Screen()
    with report_wait(drawn, "removing digits"):
        wait_for("removing digits", stderr)
    drawn.emit(Note(text="removed"))
    assert stderr.getvalue() == "  removing digits\nremoved\n"


def test_the_clock_of_a_full_bar_goes_on_while_its_step_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    drawn = Screen()
    drawn.emit(Step(name="profiling a few steps"))
    drawn.emit(Progress(name="profiling a few steps", done=15, total=15, unit="steps"))
    stderr.truncate(0)
    wait_for("0:00:02", stderr)
    assert "0:00:02" in stderr.getvalue()
    assert "15/15" in stderr.getvalue()
    drawn.emit(Step(name="profiling a few steps", done=True))
    assert (drawn.live, drawn.bars) == (None, {})


def lose_connection(tries: int) -> Screen:
    """Report that many failed tries to connect again."""
    drawn = Screen()
    for number in range(tries):
        text = f"the run is still active, reconnecting in {number} s"
        drawn.emit(RepeatedNote(text=text, level="warning", name="connection lost"))
    return drawn


def test_on_a_terminal_a_lost_connection_is_one_line_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    drawn = lose_connection(3)
    assert list(drawn.bars) == ["connection lost"]
    assert drawn.bars["connection lost"].detail.endswith("in 2 s")
    wait_for("reconnecting in 2 s", stderr)
    drawn.emit(Step(name="connection lost", done=True, brief=True))
    assert (drawn.live, drawn.bars) == (None, {})


def test_elsewhere_a_lost_connection_is_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    drawn = lose_connection(3)
    first = "the run is still active, reconnecting in 0 s\n"
    assert stderr.getvalue() == first
    for now_s in (1059.0, 1061.0):
        drawn.emit(RepeatedNote(text=f"lost at {now_s:.0f}", name="connection lost"))
    assert stderr.getvalue() == f"{first}lost at 1061\n"


def test_equal_notes_of_two_steps_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    drawn = Screen()
    for text in ("left out: data/", "left out: data/", "left out: notes/"):
        drawn.emit(UniqueNote(text=text))
    assert stderr.getvalue() == "left out: data/\nleft out: notes/\n"

"""The line between a run's start and its first output, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest

from labctl.cli import first_output, screen
from labctl.cli.first_output import WAITING, FirstOutputLine, describe_activity
from labctl.cli.screen import Screen
from labctl.errors import ConnectError
from labctl.events import Note, RepeatedNote, Step, UniqueNote, report_wait
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
    expected: str = WAITING,
) -> tuple[str, list[bytes]]:
    """Wait for the first output of a run for a moment; return what was drawn, and the log."""
    monkeypatch.setattr(screen, "WAIT_DELAY_S", 0.01)
    monkeypatch.setattr(first_output, "EVERY_S", 0.05)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr)
    log: list[bytes] = []
    line = FirstOutputLine(drawn := Screen(), describe)
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
    assert WAITING in drawn
    assert "0:00:0" in drawn
    assert log == [b"epoch 1\n"]


def test_it_shows_what_the_run_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, _ = show(monkeypatch, Terminal(), lambda run_id: f"{run_id} uses 0.9", "night uses 0.9")
    assert f"{WAITING}: night uses 0.9" in drawn


def test_a_server_that_does_not_answer_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(run_id: str) -> str:
        measured.append(run_id)
        raise ConnectError("no route")

    measured: list[str] = []
    monkeypatch.setattr(first_output, "EVERY_S", 0.0)
    FirstOutputLine(Screen(), fail)._measure("night")
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
    assert describe_activity(now, "0f1e", "other") == "its container is starting"


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

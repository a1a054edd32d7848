"""The line between a run's start and its first output, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
import time

import pytest

from labctl.cli import first_output
from labctl.cli.first_output import WAITING, FirstOutputLine
from labctl.cli.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> tuple[str, list[bytes]]:
    """Wait for the first output of a run for a moment; return what was drawn, and the log."""
    monkeypatch.setattr(first_output, "DELAY_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr)
    log: list[bytes] = []
    line = FirstOutputLine(screen := Screen())
    on_log = line.watch_log(log.append)
    line.start()
    deadline = time.monotonic() + (20 if stderr.isatty() else 0.2)
    while WAITING not in stderr.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    on_log(b"epoch 1\n")
    assert screen.live is None
    line.stop()
    return stderr.getvalue(), log


def test_a_terminal_shows_that_the_run_has_no_output_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, log = show(monkeypatch, Terminal())
    assert WAITING in drawn
    assert "0:00:0" in drawn
    assert log == [b"epoch 1\n"]


def test_elsewhere_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(monkeypatch, io.StringIO()) == ("", [b"epoch 1\n"])

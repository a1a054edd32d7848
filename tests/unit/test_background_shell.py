"""The shell that outlives a login: when `run` returns, and what becomes of it otherwise."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from labctl.agent.host import background
from labctl.agent.host.background import BackgroundShell


def set_scope_words(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a script stand for systemd-run; it ends with the words of the shell."""
    words = ["sh", "-c", script, "sh"]
    monkeypatch.setattr(background, "build_scope_words", lambda: words)


def test_it_returns_once_the_shell_has_left_the_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    set_scope_words(monkeypatch, f'sleep 0.3; touch {moved}; exec "$@"')
    with BackgroundShell() as shell:
        assert not moved.exists()
        shell.run("exit")
        assert moved.exists()


def test_it_does_not_wait_for_the_script(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with BackgroundShell() as shell:
        shell.run(f"cat {tmp_path}/gate >{tmp_path}/output")
    (tmp_path / "gate").write_text("through\n")
    deadline = time.monotonic() + 60
    while not (output := tmp_path / "output").exists() or output.read_text() != "through\n":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_service_manager_that_refuses_does_not_stop_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without its guards, a run would leave no telemetry and have no session to attach to."""
    set_scope_words(monkeypatch, "exit 1")
    os.mkfifo(tmp_path / "output")
    with BackgroundShell() as shell:
        shell.run(f"echo through >{tmp_path}/output")
    assert (tmp_path / "output").read_text() == "through\n"


def test_without_a_script_the_shell_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container that does not start gets neither a session nor a recorder."""
    set_scope_words(monkeypatch, f'"$@"; echo ended >{tmp_path}/ended')
    os.mkfifo(tmp_path / "ended")
    with pytest.raises(ZeroDivisionError), BackgroundShell():
        raise ZeroDivisionError
    assert (tmp_path / "ended").read_text() == "ended\n"

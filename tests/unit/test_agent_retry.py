"""What the agent calls again after an error, and after which pauses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from labctl.agent.host.docker import ATTEMPTS_S, PAUSE_S, UnreachableEngineError, run_docker
from labctl.agent.host.imds import Imds
from labctl.agent.host.retry import repeat_pause, retry_on
from labctl.agent.reply import Failure
from labctl.agent.watchdog.imds_notices import PROBE_PAUSES_S, has_reclaim_notices

DOCKER = """#!/bin/sh
echo "$*" >>{calls}
[ "$(wc -l <{calls})" -gt {failures} ] && echo done && exit 0
echo "{message}" >&2
exit 1
"""
NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, on a clock that nothing else moves."""
    made: list[float] = []
    monkeypatch.setattr("labctl.agent.host.retry.time.sleep", made.append)
    monkeypatch.setattr("labctl.agent.host.retry.time.monotonic", lambda: sum(made))
    return made


def raise_each(*errors: Exception) -> Any:
    left = list(errors)

    def call(*_: object) -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_a_call_that_succeeds_costs_no_pause(pauses: list[float]) -> None:
    assert retry_on(OSError, raise_each(), [1.0]) == "done"
    assert pauses == []


def test_each_error_is_followed_by_the_next_pause(pauses: list[float]) -> None:
    call = raise_each(ValueError("a"), OSError("b"))
    assert retry_on((OSError, ValueError), call, [1.0, 3.0, 9.0]) == "done"
    assert pauses == [1.0, 3.0]


def test_the_last_error_is_raised_after_the_last_pause(pauses: list[float]) -> None:
    with pytest.raises(OSError, match="c"):
        retry_on(OSError, raise_each(*map(OSError, "abcd")), [1.0, 3.0])
    assert pauses == [1.0, 3.0]


def test_another_error_is_raised_at_once(pauses: list[float]) -> None:
    with pytest.raises(ValueError, match="b"):
        retry_on(OSError, raise_each(OSError("a"), ValueError("b")), [1.0, 1.0])
    assert pauses == [1.0]


@pytest.mark.parametrize(("limit_s", "count"), [(2.0, 4), (1.9, 4), (0.0, 0)])
def test_equal_pauses_end_with_the_limit(pauses: list[float], limit_s: float, count: int) -> None:
    with pytest.raises(OSError, match="down"):
        retry_on(OSError, raise_each(*[OSError("down")] * 9), repeat_pause(0.5, limit_s))
    assert pauses == [0.5] * count


def write_docker(directory: Path, failures: int, message: str) -> Path:
    calls = directory / "calls"
    script = directory / "docker"
    script.write_text(DOCKER.format(calls=calls, failures=failures, message=message))
    script.chmod(0o755)
    return calls


def test_a_docker_command_waits_for_its_daemon(
    pauses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    calls = write_docker(tmp_path, 2, NO_DAEMON)
    assert run_docker("ps").stdout == "done\n"
    assert calls.read_text() == "ps\n" * 3
    assert pauses == [PAUSE_S, PAUSE_S]


def test_a_daemon_that_stays_away_is_reported_after_the_limit(
    pauses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write_docker(tmp_path, 999, NO_DAEMON)
    with pytest.raises(UnreachableEngineError) as caught:
        run_docker("ps", check=False)
    assert (caught.value.report.kind, caught.value.report.why) == ("engine", NO_DAEMON)
    assert sum(pauses) == ATTEMPTS_S


def test_another_failure_of_docker_is_not_tried_again(
    pauses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    calls = write_docker(tmp_path, 999, "No such container: x")
    with pytest.raises(Failure, match="docker ps failed"):
        run_docker("ps")
    assert calls.read_text() == "ps\n"
    assert pauses == []


@pytest.mark.parametrize(("failures", "expected"), [(0, True), (2, True), (3, False)])
def test_a_metadata_service_may_start_late(
    pauses: list[float], failures: int, expected: bool
) -> None:
    call = raise_each(*[OSError("refused")] * failures)

    def get(path: str) -> SimpleNamespace:
        call()
        return SimpleNamespace(status=200, body="spot\n")

    assert has_reclaim_notices(cast("Imds", SimpleNamespace(get=get))) is expected
    assert pauses == list(PROBE_PAUSES_S[:failures])

"""For how long a run on this machine, with real processes, has shown no progress."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labctl.agent.host.paths import lab_dir, labctl_home, read_record, write_json
from labctl.agent.runs import runs, stall
from labctl.agent.runs.process_executor import ProcessExecutor, read_process
from labctl.agent.runs.run_state import inspect_run
from labctl.wire.codec import to_json
from labctl.wire.runs import PROCESS, RunRequest, RunSpec, StallRecord, StallReply, StartRunRequest

LAB_ID = "0f1e2d3c4b5a"
DEADLINE_S = 20.0
# Prints until it is stopped.
PRINTS = "while :; do echo step; sleep 0.05; done"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Starts a shell line as a run; returns the run's directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine")
    (lab_dir("digits", LAB_ID) / "code").mkdir(parents=True)

    def start_line(line: str) -> Path:
        command = ("sh", "-c", line)
        spec = RunSpec(f"night-{os.getpid()}", "digits", LAB_ID, command, "", {}, executor=PROCESS)
        return Path(runs.start(StartRunRequest(spec)).directory)

    yield start_line
    for attempt in (labctl_home() / ".attempts").iterdir():
        ProcessExecutor().remove(attempt.name)
    # The sessions beside the runs; TMUX_TMPDIR keeps those of others out of reach.
    subprocess.run(["tmux", "kill-server"], check=False, capture_output=True)


def measure(directory: Path) -> StallReply:
    return stall.measure(RunRequest("digits", LAB_ID, directory.name))


def measure_s(directory: Path) -> float:
    stalled_s = measure(directory).stalled_s
    assert stalled_s is not None
    return stalled_s


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def send_signal(directory: Path, number: int) -> None:
    """Send a signal to all processes of the run."""
    process = read_process(inspect_run(directory, {}).container)
    assert process is not None
    os.killpg(process.pid, number)


def test_a_stopped_process_stalls_until_it_goes_on(start: Callable[[str], Path]) -> None:
    directory = start(PRINTS)
    log = directory / "logs" / "run.log"
    wait_until(lambda: log.stat().st_size > 10)
    send_signal(directory, signal.SIGSTOP)
    measure(directory)
    time.sleep(0.3)
    assert measure_s(directory) >= 0.3
    (output,) = measure(directory).outputs
    assert (output.process, output.printed_at) == (0, log.stat().st_mtime)
    assert output.started_at < output.printed_at
    send_signal(directory, signal.SIGCONT)
    size = log.stat().st_size
    wait_until(lambda: log.stat().st_size > size)
    assert measure_s(directory) < 0.3


def test_a_changed_output_is_progress_and_telemetry_is_none(start: Callable[[str], Path]) -> None:
    directory = start("exec sleep 600")
    measure(directory)
    time.sleep(0.2)
    (directory / "logs" / "telemetry.jsonl").write_text("{}\n")
    before_s = measure_s(directory)
    assert before_s >= 0.2
    epoch = directory / "checkpoints" / "epoch-1"
    epoch.mkdir(parents=True)
    assert measure_s(directory) >= before_s
    (epoch / "model.pt").write_text("weights")
    assert measure_s(directory) < 0.2


def test_what_nobody_saw_and_a_corrected_clock_are_no_stall(
    start: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = start("exec sleep 600")
    an_hour_ago = time.time() - 3600
    os.utime(directory / "logs" / "run.log", (an_hour_ago, an_hour_ago))
    assert measure_s(directory) < 1
    monkeypatch.setattr(stall.time, "time", lambda: an_hour_ago + 7200)
    assert measure_s(directory) < 1


def test_what_was_seen_in_another_boot_or_attempt_does_not_count(
    start: Callable[[str], Path],
) -> None:
    directory = start("exec sleep 600")
    measure(directory)
    path = directory / stall.RECORD
    record = read_record(StallRecord, path)
    assert record is not None
    long_ago = record._replace(since_s=record.since_s - 3600)
    write_json(path, to_json(long_ago))
    assert measure_s(directory) >= 3600
    for other in (long_ago._replace(boot="other"), long_ago._replace(attempt="other-1")):
        write_json(path, to_json(other))
        assert measure_s(directory) < 1


def test_every_process_of_torchrun_has_a_time(start: Callable[[str], Path]) -> None:
    directory = start("exec sleep 600")
    logs = directory / "logs" / "ranks" / "none_x" / "attempt_0"
    for process, text in (("1", "step 1\n"), ("2", "")):
        (logs / process).mkdir(parents=True)
        (logs / process / "stderr.log").touch()
        (logs / process / "stdout.log").write_text(text)
    outputs = measure(directory).outputs
    assert [one.process for one in outputs] == [0, 1, 2]
    assert outputs[1].printed_at == (logs / "1" / "stdout.log").stat().st_mtime
    assert outputs[2].printed_at == outputs[2].started_at


def test_a_run_that_has_ended_does_not_stall(start: Callable[[str], Path]) -> None:
    directory = start("exit 3")
    wait_until(lambda: inspect_run(directory, {}).state == "exited")
    assert measure(directory) == StallReply()

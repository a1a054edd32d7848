"""entry.sh, run for real by the shells that images have."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labctl.agent.runs.runs import read_entry_script

SHELLS = [shell for shell in ("sh", "dash", "bash") if shutil.which(shell)]
SLOW_TO_STOP = """
import signal, sys, time
def stop(number, frame):
    time.sleep(float(sys.argv[2]))
    print("saved", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
with open(sys.argv[1], "w") as ready:
    ready.write("ready")
while True:
    time.sleep(10)
"""


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    (directory / "logs").mkdir(parents=True)
    (directory / ".labctl").mkdir()
    (directory / ".labctl" / "entry.sh").write_text(read_entry_script())
    return directory


def begin(shell: str, run: Path, *words: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [shell, str(run / ".labctl" / "entry.sh"), *words],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LABCTL_SECRETS_DIR": str(run.parent / "secrets"), **env},
    )


def ended(run: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((run / ".labctl" / "exit.json").read_text())
    return body


def log(run: Path) -> str:
    return (run / "logs" / "run.log").read_text()


def test_a_program_that_the_image_lacks_is_named(shell: str, run: Path) -> None:
    words = [shell, str(run / ".labctl" / "entry.sh"), "nvidia-smi", "-L"]
    environ = {"PATH": str(run), "LABCTL_ENTER": "1"}
    words[0] = shutil.which(shell) or ""
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr == "labctl: the image of this run has no program nvidia-smi\n"
    words[2:] = ["echo", "here"]
    done = subprocess.run(words, env={"LABCTL_ENTER": "1"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "here\n")


@pytest.mark.parametrize(("line", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_code_is_passed_on_and_written(
    shell: str, run: Path, line: str, code: int
) -> None:
    assert begin(shell, run, "sh", "-c", line).wait(120) == code
    body = ended(run)
    assert (body["code"], body["asked"]) == (code, "")
    assert body["ended_at"] > 1_700_000_000
    assert body["peak_memory_bytes"] >= 0
    assert not (run / ".labctl" / "exit.new").exists()


def test_the_memory_of_the_machine_is_not_that_of_a_container_in_a_job(
    shell: str, run: Path
) -> None:
    assert begin(shell, run, "true", SLURM_JOB_ID="7").wait(120) == 0
    assert (ended(run)["peak_memory_bytes"], ended(run)["oom_kills"]) == (0, 0)


def test_a_command_that_is_not_there(shell: str, run: Path) -> None:
    assert begin(shell, run, "no-such-program").wait(120) == 127
    assert "no-such-program" in log(run)


def test_a_container_that_is_started_again_does_not_run_its_command_again(
    shell: str, run: Path
) -> None:
    assert begin(shell, run, "sh", "-c", "echo once; exit 7").wait(120) == 7
    assert begin(shell, run, "sh", "-c", "echo once; exit 7").wait(120) == 125
    assert (log(run), ended(run)["code"]) == ("once\n", 7)


def test_words_arrive_whole_and_both_outputs_are_logged(shell: str, run: Path) -> None:
    (run / "logs" / "run.log").write_text("before\n")
    line = 'printf "<%s>" "$@"; echo; echo wrong >&2'
    assert begin(shell, run, "sh", "-c", line, "x", "a b", "$HOME", "*", "").wait(120) == 0
    assert log(run) == "before\n<a b><$HOME><*><>\nwrong\n"


@pytest.mark.parametrize("pause_s", ["0", "0.3"])
def test_sigterm_reaches_the_command_and_its_end_is_awaited(
    shell: str, run: Path, pause_s: str
) -> None:
    fifo = run / "ready"
    os.mkfifo(fifo)
    process = begin(shell, run, sys.executable, "-c", SLOW_TO_STOP, str(fifo), pause_s)
    assert fifo.read_text() == "ready"
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 3
    assert log(run) == "saved\n"
    assert (ended(run)["code"], ended(run)["asked"]) == (3, "TERM")


def test_secrets_are_exported_byte_for_byte(shell: str, run: Path) -> None:
    values = {"A": "plain", "B": "ends\n\n", "C": 'it\'s "$HOME" `x` \\', "D": "two\nlines"}
    (run.parent / "secrets").mkdir()
    for name, value in values.items():
        (run.parent / "secrets" / name).write_text(value)
    show = "import json, os; print(json.dumps({k: os.environ[k] for k in 'ABCD'}))"
    assert begin(shell, run, sys.executable, "-c", show).wait(120) == 0
    assert json.loads(log(run)) == values


def test_entering_a_container_writes_no_ending(shell: str, run: Path) -> None:
    (run.parent / "secrets").mkdir()
    (run.parent / "secrets" / "A").write_text("s3")
    check = 'test "$A" = s3 && exit 9'
    assert begin(shell, run, "sh", "-c", check, LABCTL_ENTER="1").wait(120) == 9
    assert not (run / ".labctl" / "exit.json").exists()
    assert not (run / "logs" / "run.log").exists()

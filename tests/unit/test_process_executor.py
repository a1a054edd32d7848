"""Runs as plain processes, on this machine: no Docker Engine answers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labctl.agent.host import engine, telemetry
from labctl.agent.host.docker import OPENED_LATER, end_session
from labctl.agent.host.gpus import Gpus, select_given
from labctl.agent.host.host_usage import HostUsageReader, load_psutil, name_session
from labctl.agent.host.other_programs import OtherPrograms
from labctl.agent.host.paths import lab_dir, labctl_home
from labctl.agent.host.top import TopView
from labctl.agent.reply import Failure
from labctl.agent.runs import runs, tmux_session
from labctl.agent.runs.ended_runs import clear
from labctl.agent.runs.executor import Environment, NewAttempt
from labctl.agent.runs.process_executor import ProcessExecutor, read_process
from labctl.agent.runs.run_state import inspect_run, status
from labctl.wire.runs import (
    PROCESS,
    CancelRunRequest,
    RunRecord,
    RunRequest,
    RunSpec,
    StartRunReply,
    StartRunRequest,
    StatusRequest,
)
from labctl.wire.telemetry import GpuRecord
from labctl.wire.verbs import LabRequest

LAB_ID = "0f1e2d3c4b5a"
DEADLINE_S = 30.0
ENVIRONMENT_REFERENCE = "labctl/environment:0123456789abcdef"
CHECKPOINT_ON_TERM = """
import os, signal, sys, time
def save(*_):
    with open(os.environ["LABCTL_CHECKPOINT_DIR"] + "/last", "w") as file:
        file.write("step 7")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The lab's directory on a server without Docker; what runs ends after it, also in tmux."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine")
    monkeypatch.setattr(engine, "ATTEMPTS_S", 0.0)  # it waits for one that is being restarted
    directory = lab_dir("digits", LAB_ID)
    (directory / "code").mkdir(parents=True)
    yield directory
    attempts = labctl_home() / ".attempts"
    for attempt in attempts.iterdir() if attempts.is_dir() else ():
        ProcessExecutor().remove(attempt.name)
    if shutil.which("tmux"):
        subprocess.run(["tmux", "kill-server"], capture_output=True, check=False)


def make_spec(*command: str, **changes: Any) -> RunSpec:
    run = f"night-{os.getpid()}"
    spec = RunSpec(run, "digits", LAB_ID, command, "", {}, executor=PROCESS)
    return spec._replace(**changes)


def start(*command: str, **changes: Any) -> Path:
    return start_reply(make_spec(*command, **changes))[1]


def start_reply(spec: RunSpec, secrets: dict[str, str] | None = None) -> tuple[StartRunReply, Path]:
    reply = runs.start(StartRunRequest(spec, secrets or {}))
    return reply, Path(reply.directory)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for_end(directory: Path) -> RunRecord:
    wait_for(lambda: inspect_run(directory, {}).state not in ("claimed", "starting", "running"))
    return inspect_run(directory, {})


def read_log(directory: Path) -> str:
    return (directory / "logs" / "run.log").read_text()


def read_leader(directory: Path) -> int:
    process = read_process(inspect_run(directory, {}).container)
    assert process is not None
    return process.pid


def cancel(directory: Path, grace_s: int = 10) -> RunRecord:
    request = CancelRunRequest("digits", LAB_ID, directory.name, grace_s)
    return runs.cancel(request).run


def test_a_command_runs_in_its_copy_of_the_code_with_its_environment(root: Path) -> None:
    (root / "code" / "train.sh").write_text('pwd; echo "$LABCTL_RUN_ID $LR"; ls "$LABCTL_DATA_DIR"')
    (root / "data").mkdir()
    (root / "data" / "digits.npz").touch()
    directory = start("sh", "train.sh", env={"LR": "1 '2'"})
    ended = wait_for_end(directory)
    assert (ended.state, ended.exit_code, ended.summary) == ("exited", 0, "done")
    code = directory / "code"
    assert read_log(directory).splitlines() == [str(code), f"{directory.name} 1 '2'", "digits.npz"]


def test_its_exit_code_and_standard_error_are_kept(root: Path) -> None:
    ended = wait_for_end(directory := start("sh", "-c", "echo oh no >&2; exit 3"))
    assert (ended.state, ended.exit_code, ended.summary) == ("exited", 3, "failed with exit code 3")
    assert read_log(directory) == "oh no\n"


def make_environment() -> Path:
    """Make an environment with a program, and code of the lab in editable mode."""
    directory = labctl_home() / ".environments" / "0123456789abcdef"
    for name in ("labs", "env/bin", "env/lib/python3.11/site-packages"):
        (directory / name).mkdir(parents=True)
    program = directory / "env" / "bin" / "python"
    program.write_text('#!/bin/sh\necho "$VIRTUAL_ENV $PYTHONPATH"\n')
    program.chmod(0o755)
    paths = directory / "env" / "lib" / "python3.11" / "site-packages" / "birds.pth"
    paths.write_text(f"{directory}/code/src\n/elsewhere\nimport sys\n")
    return directory


def test_programs_and_code_come_from_its_environment_and_its_own_copy(root: Path) -> None:
    environment = make_environment()
    spec = make_spec("python", image=ENVIRONMENT_REFERENCE, env={"PYTHONPATH": "tools"})
    reply, directory = start_reply(spec)
    assert reply.missing == ENVIRONMENT_REFERENCE  # nobody has built it to its end
    (environment / "whole").touch()
    _, directory = start_reply(spec)
    wait_for_end(directory)
    assert read_log(directory) == f"{environment}/env tools:{directory}/code/src\n"


def test_a_program_that_does_not_exist_is_127(root: Path) -> None:
    ended = wait_for_end(directory := start("pyton", "train.py"))
    assert ended.exit_code == 127
    assert "pyton: not found" in read_log(directory)


def test_secrets_are_variables_of_the_program_and_on_no_disk(root: Path) -> None:
    spec = make_spec("sh", "-c", 'printf %s "$TOKEN" | wc -c', secrets=("TOKEN",))
    _, directory = start_reply(spec, {"TOKEN": "s3cret\n"})
    wait_for_end(directory)
    assert read_log(directory).strip() == "7"
    found = subprocess.run(["grep", "-r", "s3cret", str(labctl_home())], capture_output=True)
    assert found.returncode == 1


def test_a_repeated_start_finds_the_run(root: Path) -> None:
    spec = make_spec("sh", "-c", "echo once; sleep 60")
    reply, directory = start_reply(spec)
    assert reply.run is not None
    assert (reply.run.state, reply.found) == ("running", False)
    wait_for(lambda: read_log(directory))
    again, _ = start_reply(spec)
    assert again.found
    assert again.run is not None
    assert again.run.container == reply.run.container
    assert read_log(directory) == "once\n"


def test_an_attempt_that_never_began_does_not_begin_beside_the_next(root: Path) -> None:
    """As if the call that started the first one had been killed before its session began."""
    directory = start("sh", "-c", "echo once; sleep 60")
    first = inspect_run(directory, {}).container
    wait_for(lambda: read_log(directory))
    earlier = labctl_home() / ".attempts" / f"{first.rpartition('-')[0]}-0"
    earlier.mkdir()
    for name in ("attempt.json", "enter.sh"):
        text = (earlier.with_name(first) / name).read_text()
        (earlier / name).write_text(text.replace(first, earlier.name))
    cancel(directory)
    (directory / ".labctl" / "record.json").unlink()
    (directory / ".labctl" / "exit.json").unlink()
    spec = make_spec("sh", "-c", "echo once; sleep 60")
    attempt = NewAttempt(f"{first.rpartition('-')[0]}-2", root, directory, spec, Environment())
    assert ProcessExecutor().create(attempt)
    late = subprocess.run(["sh", str(earlier / "enter.sh"), "true"], capture_output=True)
    assert late.returncode != 0
    assert not earlier.exists()
    assert ProcessExecutor().inspect([first])[first].status == "ended"


def test_it_outlives_the_process_that_started_it(root: Path) -> None:
    directory = start("sleep", "60")
    listed = status(StatusRequest("digits", LAB_ID)).runs
    assert [(run.id, run.state) for run in listed] == [(directory.name, "running")]


def test_who_waits_for_it_learns_of_its_end(root: Path) -> None:
    directory = start("sleep", "0.3")
    words = ProcessExecutor().build_wait_words(inspect_run(directory, {}).container)
    subprocess.run(words, check=True, timeout=DEADLINE_S)
    assert inspect_run(directory, {}).state == "exited"


def test_cancel_lets_it_save_a_checkpoint(root: Path) -> None:
    directory = start("python3", "-c", CHECKPOINT_ON_TERM)
    wait_for(lambda: "ready" in read_log(directory))
    ended = cancel(directory)
    assert (ended.state, ended.exit_code) == ("cancelled", 143)
    assert (directory / "checkpoints" / "last").read_text() == "step 7"


def test_a_held_part_that_labctl_ends_has_failed(root: Path) -> None:
    """A recovery that fails on another server ends it, and no user has canceled the run."""
    spec = make_spec("true")
    runs.start(StartRunRequest(spec, {}, held=True))
    reason = "not all servers could start it: the disk is full"
    request = CancelRunRequest("digits", LAB_ID, spec.id, 1, reason)
    ended = runs.cancel(request).run
    assert (ended.state, ended.exit_code, ended.summary) == ("exited", 1, reason)
    assert runs.cancel(request).run == ended


def test_cancel_kills_what_does_not_end(root: Path) -> None:
    directory = start("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    wait_for(lambda: "ready" in read_log(directory))
    ended = cancel(directory, grace_s=1)
    assert (ended.state, ended.exit_code) == ("cancelled", None)
    assert ended.summary == "canceled: it did not stop in time and was killed"


def test_cancel_ends_what_the_command_left_behind(root: Path) -> None:
    directory = start("sh", "-c", "sleep 61 & echo ready; wait")
    wait_for(lambda: "ready" in read_log(directory))
    name = inspect_run(directory, {}).container
    cancel(directory, grace_s=1)
    assert ProcessExecutor().inspect([name])[name].status == "ended"
    assert subprocess.run(["pgrep", "-f", "^sleep 61$"], capture_output=True).returncode == 1


def test_a_process_killed_from_outside_is_reported_as_such(root: Path) -> None:
    directory = start("sleep", "60")
    name = inspect_run(directory, {}).container
    wait_for((labctl_home() / ".attempts" / name / "process.json").exists)
    os.killpg(read_leader(directory), signal.SIGKILL)
    ended = wait_for_end(directory)
    assert (ended.state, ended.exit_code) == ("exited", None)
    assert ended.summary == "its process was killed from outside"


def test_after_a_restart_of_the_server_it_is_lost(root: Path) -> None:
    directory = start("sleep", "60")
    name = inspect_run(directory, {}).container
    for file in (
        directory / ".labctl" / "attempt-1",
        labctl_home() / ".attempts" / name / "attempt.json",
    ):
        text = file.read_text()
        start_of_token = text.index('"boot":"') + len('"boot":"')
        file.write_text(text[:start_of_token] + "x" + text[start_of_token:])
    assert inspect_run(directory, {}).state == "lost"


def test_a_command_beside_it_has_its_environment(root: Path) -> None:
    directory = start("sleep", "60", env={"LR": "0.1"})
    name = inspect_run(directory, {}).container
    words = ProcessExecutor().build_exec_words(name, ["sh", "-c", 'echo "$LR"; pwd'])
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0.1", str(directory / "code")]
    words = ProcessExecutor().build_exec_words(name, ["pyton"])
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, "labctl: the server has no program pyton\n")
    assert inspect_run(directory, {}).state == "running"


BUSY = """
import subprocess, sys
held = bytearray(64 * 1024**2)
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
open("/dev/null", "w").write(str(len(held)))
print("ready", flush=True)
while True: pass
"""


def test_telemetry_measures_all_processes_of_it(root: Path) -> None:
    directory = start("python3", "-c", BUSY)
    idle = start("sleep", "60", id="idle")
    wait_for(lambda: "ready" in read_log(directory))
    recorded = telemetry.list_recorded({})
    assert {run.directory for run in recorded.values()} == {directory, idle}
    run = next(run for run in recorded.values() if run.directory == directory)
    runs = {session: each.directory.name for session, each in recorded.items()}
    psutil = load_psutil()
    gpus, host = Gpus(), HostUsageReader(labctl_home(), psutil)
    programs = OtherPrograms(psutil, gpus)
    programs.refresh()
    assert run.build_line([], host.read(), programs, runs)
    time.sleep(1)
    programs.refresh()
    line = run.build_line([], host.read(), programs, runs)
    assert line is not None
    assert line.attempt == 1
    assert line.processes == 3  # with its entry script
    assert (line.cpu_cores or 0) > 0
    assert 64 * 1024**2 < (line.memory_bytes or 0) < 200 * 1024**2
    assert line.other_runs == 1
    assert "night" not in "".join(other.run for other in line.others)
    of_idle = recorded[name_session(read_leader(idle))]

    def is_beside() -> bool:
        programs.refresh()
        line = of_idle.build_line([], host.read(), programs, runs)
        return line is not None and directory.name in [other.run for other in line.others]

    wait_for(is_beside)
    assert telemetry.list_recorded(recorded) == recorded
    cancel(directory, grace_s=0)
    assert [each.directory for each in telemetry.list_recorded(recorded).values()] == [idle]
    assert run.build_line([], host.read(), programs, runs) is None


def test_top_shows_it(root: Path) -> None:
    directory = start("python3", "-c", BUSY)
    wait_for(lambda: "ready" in read_log(directory))
    (directory / "logs" / "progress.json").write_text('{"step": 3, "total_steps": 8}')
    view = TopView()
    view.read()
    time.sleep(0.5)
    sample = view.read()
    (row,) = sample.runs
    assert (row.run, row.lab, row.lab_id) == (directory.name, "digits", LAB_ID)
    assert (row.step, row.total_steps) == (3, 8)
    assert row.cpu_cores is not None
    assert row.started_at.startswith("20")

    def is_named() -> bool:
        view.refreshed_s = 0.0  # a refresh is due
        processes = view.read().processes
        named = {each.run for each in processes if "while True" in each.command}
        return named == {directory.name}

    wait_for(is_named)


@pytest.mark.parametrize(("gpus", "given"), [("", 0), ("all", 2), ("GPU-b", 1)])
def test_its_gpus_are_those_that_it_sees(root: Path, gpus: str, given: int) -> None:
    start("sleep", "60", gpus=gpus)
    (run,) = telemetry.list_recorded({}).values()
    cards = [GpuRecord(index="0", uuid="GPU-a"), GpuRecord(index="1", uuid="GPU-b")]
    assert len(select_given(cards, run.usage_reader.container)) == given
    assert run.probe is None


@pytest.mark.parametrize(("gpus", "visible"), [("", "[]"), ("GPU-1,GPU-2", "[GPU-1,GPU-2]")])
def test_it_sees_only_its_gpus(root: Path, gpus: str, visible: str) -> None:
    directory = start("sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]"', gpus=gpus)
    wait_for_end(directory)
    assert read_log(directory).strip() == visible


def test_with_all_gpus_nothing_is_hidden(root: Path) -> None:
    wait_for_end(directory := start("sh", "-c", "env", gpus="all"))
    assert "CUDA_VISIBLE_DEVICES" not in read_log(directory)


def test_data_of_the_server_is_where_the_run_looks(root: Path) -> None:
    (root / "data" / "imagenet").mkdir(parents=True)  # left by a run in a container
    command = ("sh", "-c", 'cd "$LABCTL_DATA_DIR/imagenet" && pwd -P')
    for data in ("/srv", "/media"):
        directory = start(*command, id=f"in{data.replace('/', '-')}", data={"imagenet": data})
        wait_for_end(directory)
        assert read_log(directory) == f"{data}\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_bytes": 2**30}, "limits.memory"),
        ({"cpus": 1.5, "memory_bytes": 1}, "limits.memory and limits.cpus"),
    ],
)
def test_what_needs_a_container_is_refused_and_leaves_nothing(
    root: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(Failure) as caught:
        start("true", **changes)
    assert caught.value.report.kind == "policy"
    assert words in caught.value.report.what
    assert not list((root / "runs").iterdir())


def test_ended_runs_are_cleared_with_their_records(root: Path) -> None:
    wait_for_end(directory := start("true"))
    assert clear(LabRequest("digits", LAB_ID)).cleared == (directory.name,)
    assert not list((labctl_home() / ".attempts").iterdir())
    assert read_log(directory) == ""


@pytest.mark.skipif(not shutil.which("tmux"), reason="there is no tmux on this machine")
def test_a_session_opened_after_the_end_waits_for_its_viewer(root: Path) -> None:
    """Whoever notices the end of a run later, ends only the session that was there before."""
    directory = start("true")
    wait_for(lambda: inspect_run(directory, {}).state == "exited")
    opened = tmux_session.open_session(RunRequest("digits", LAB_ID, directory.name))
    assert opened.ended
    end_session(directory.name)
    find = ["tmux", "has-session", "-t", f"={opened.session}"]
    assert subprocess.run(find, check=False).returncode == 0
    subprocess.run(
        ["tmux", "set-option", "-u", "-t", f"={opened.session}:", OPENED_LATER], check=True
    )
    end_session(directory.name)
    assert subprocess.run(find, capture_output=True, check=False).returncode == 1

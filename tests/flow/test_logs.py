"""`labctl logs` of a run that has printed nothing, and while the network is away."""

from __future__ import annotations

import pytest
from lab_world import Labctl, RunMachine, World, unreachable

from labctl.cli import rank_logs
from labctl.errors import BusyError
from labctl.lifecycle import up
from labctl.model import Run
from labctl.retry import ReconnectPolicy
from labctl.runs import runs
from labctl.transports import Result


@pytest.fixture
def logged(run_lab: World, run_machine: RunMachine) -> World:
    """A lab with the active run r3 on record."""
    run_machine.put_run("r3")
    context = run_lab.context()
    runs.refresh(context, context.get_server())
    return run_lab


def test_an_active_run_without_output_has_not_printed_anything_yet(
    logged: World, labctl: Labctl
) -> None:
    output = labctl(logged, "logs")
    assert (output.code, output.out) == (0, "")
    assert output.err == "run r3 has not printed anything yet\n"


@pytest.mark.parametrize("words", [("logs",), ("logs", "-f"), ("logs", "-n", "3")])
def test_a_run_that_ended_without_output_says_so(
    logged: World, run_machine: RunMachine, labctl: Labctl, words: tuple[str, ...]
) -> None:
    run_machine.put_run("r3", state="exited", exit_code=0, told="done")
    output = labctl(logged, *words)
    assert (output.out, output.err) == ("", "run r3 ended without output\nrun r3: done\n")


def test_of_a_log_with_lines_nothing_is_said(
    logged: World, run_machine: RunMachine, labctl: Labctl
) -> None:
    run_machine.log = b"epoch 1\n"
    output = labctl(logged, "logs", "-f")
    assert (output.out, output.err) == ("epoch 1\n", "run r3: done\n")


@pytest.mark.parametrize(
    ("text", "said"), [("", "; run r3 had not printed anything\n"), ("epoch 1\n", "pulled\n")]
)
def test_the_saved_log_of_a_run_without_output(
    logged: World, labctl: Labctl, text: str, said: str
) -> None:
    log = logged.home / "lab" / "runs" / "r3" / "logs" / "run.log"
    log.parent.mkdir(parents=True)
    log.write_text(text)
    logged.cloud.machines.clear()
    context = logged.context()
    context.state.drop_server(context.get_server().id)
    output = labctl(logged, "logs")
    assert output.out == text
    assert output.err.endswith(said)


def test_the_log_of_an_earlier_server_is_read_from_this_machine(
    logged: World, labctl: Labctl
) -> None:
    log = logged.home / "lab" / "runs" / "r2" / "logs" / "run.log"
    log.parent.mkdir(parents=True)
    log.write_text("epoch 1\nepoch 2\n")
    context = logged.context()
    earlier = Run(
        id="r2",
        lab_id=context.lab_id,
        server_id="ended",
        state="exited",
        exit_code=0,
        summary="done",
    )
    context.state.save_run(earlier)
    output = labctl(logged, "logs", "r2", "-n", "1")
    assert (output.code, output.out) == (0, "epoch 2\n")
    assert "the run's server has ended" in output.err


def test_a_log_that_is_followed_without_a_network_prints_one_line(
    logged: World, run_machine: RunMachine, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [unreachable() for _ in range(5)]
    answer = run_machine._answer

    def fail_first(line: str, stdin: bytes) -> Result:
        if line.split()[-1] == "follow" and failures:
            raise failures.pop()
        return answer(line, stdin)

    monkeypatch.setattr(run_machine, "_answer", fail_first)
    build = ReconnectPolicy.__init__
    monkeypatch.setattr(
        ReconnectPolicy,
        "__init__",
        lambda self, errors, *, on_cut: build(self, errors, on_cut=on_cut, pause_s=0.01),
    )
    run_machine.log = b"epoch 1\n"
    output = labctl(logged, "logs", "-f")
    assert failures == []
    assert output.out == "epoch 1\n"
    first, last = output.err.splitlines()
    assert first == "the run is still active, reconnecting in 0.01 s: no answer"
    assert last == "run r3: done"


@pytest.fixture
def ranked(lab: World) -> World:
    """A lab with a run of four processes: the first printed nothing, the last was not started."""
    text = "lab: digits\nrun: 'true'\nlaunch: {with: torchrun, per_server: 4}\n"
    (lab.home / "lab" / "lab.yaml").write_text(text)
    context = lab.context()
    up.up(context)
    logs = lab.machine.run_with("r1") / "logs"
    (logs / "run.log").touch()
    for process, log in ((1, b"step 1\n\nstep 2"), (2, b"ready\n")):
        directory = logs / "ranks" / "x" / "attempt_0" / str(process)
        directory.mkdir(parents=True)
        (directory / "stdout.log").write_bytes(log)
        (directory / "stderr.log").touch()
    runs.refresh(context, context.get_server())
    return lab


def test_the_logs_of_all_processes_say_which_was_not_started(ranked: World, labctl: Labctl) -> None:
    output = labctl(ranked, "logs", "--rank", "all")
    assert output.out == "[1] step 1\n[1] \n[1] step 2\n[2] ready\n"
    assert output.err == ("rank 0 of run r1 has no output\nrank 3 of run r1 was not started\n")
    assert labctl(ranked, "logs", "--rank", "all", "-n", "1").out == "[1] step 2\n[2] ready\n"


def test_each_log_is_printed_before_the_next_is_fetched(
    ranked: World, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logs together may be larger than the memory of this machine."""
    answer = ranked.machine._answer

    def fail_at_last(line: str, stdin: bytes) -> Result:
        if line.split()[-1] == "follow" and b'"process":2' in stdin.replace(b" ", b""):
            raise unreachable()
        return answer(line, stdin)

    monkeypatch.setattr(ranked.machine, "_answer", fail_at_last)
    output = labctl(ranked, "logs", "--rank", "all")
    assert output.out == "[1] step 1\n[1] \n[1] step 2\n"
    assert "no answer" in output.err
    assert output.code == BusyError.exit_code


def test_a_line_that_arrives_in_pieces_has_one_rank_before_it() -> None:
    written: list[bytes] = []
    lines = rank_logs._PrefixedLines(b"[7] ", written.append)
    for block in (b"a", b"b\nc", b"\n", b"\n", b"", b"d"):
        lines.feed(block)
    lines.finish()
    assert b"".join(written) == b"[7] ab\n[7] c\n[7] \n[7] d\n"

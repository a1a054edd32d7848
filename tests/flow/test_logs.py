"""`labctl logs` of a run that has printed nothing, and while the network is away."""

from __future__ import annotations

import pytest
from lab_world import Labctl, RunMachine, World, unreachable

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

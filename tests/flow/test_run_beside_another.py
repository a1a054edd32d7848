"""`labctl run` and `labctl cancel` while other runs of the lab are active on its server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from lab_world import LAB_ID, Labctl, RunMachine, World

from labctl.cli.runs import _print_still_running
from labctl.runs import runs
from labctl.state.ledgers import HANDED

BESIDE_R3 = (
    "run r3 is still running on this server; this run started beside it\n"
    "  labctl logs -f r3   follow r3\n"
    "  labctl cancel r3    stop r3\n"
)


@pytest.fixture
def busy_lab(run_lab: World, run_machine: RunMachine) -> World:
    """A lab whose run r3 is active, and on record here."""
    run_machine.put_run("r3")
    context = run_lab.context()
    runs.refresh(context, context.get_server())
    return run_lab


@pytest.mark.parametrize("words", [("run",), ("run", "--detach"), ("run", "--id", "r4")])
def test_an_active_run_is_named_when_the_next_one_has_started(
    busy_lab: World, labctl: Labctl, words: tuple[str, ...]
) -> None:
    output = labctl(busy_lab, *words)
    assert output.code == 0
    assert BESIDE_R3 in output.err


def test_a_profile_names_an_active_run_once(busy_lab: World, labctl: Labctl) -> None:
    text = labctl(busy_lab, "profile", "--no-page").err.replace("\n", " ")
    assert text.count("r3 is still running") == 1
    assert (
        "run r3 is still running on this server, so the timings of this profile are affected. "
        "To stop r3: labctl cancel r3"
    ) in text
    assert "another run" not in text
    assert "started beside" not in text


def test_a_probe_says_what_an_active_run_does_to_its_estimate(
    busy_lab: World, run_machine: RunMachine, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = run_machine._status

    def end_probe(request: dict[str, Any]) -> Any:
        for name in request["runs"]:
            run_machine.put_run(name, state="exited", exit_code=0, told="done")
        return answer(request)

    monkeypatch.setattr(run_machine, "_status", end_probe)
    text = labctl(busy_lab, "run", "--detach", "--probe", "1%").err.replace("\n", " ")
    assert (
        "run r3 is still running on this server, so the estimate of this probe is affected. "
        "To stop r3: labctl cancel r3"
    ) in text
    assert "follow r3" not in text


def test_a_run_that_has_ended_meanwhile_is_not_named(
    busy_lab: World, run_machine: RunMachine, labctl: Labctl
) -> None:
    run_machine.put_run("r3", state="exited", exit_code=0)
    assert "r3" not in labctl(busy_lab, "run", "--detach").err


def test_a_run_that_succeeded_says_how_to_get_its_results(run_lab: World, labctl: Labctl) -> None:
    output = labctl(run_lab, "run", "--id", "r1")
    assert output.code == 0
    *_, ended, following = output.err.splitlines()
    assert ended == "run r1: done"
    assert following == "labctl pull r1    download its results"


def test_a_run_that_ended_with_its_removed_server_says_so(busy_lab: World, labctl: Labctl) -> None:
    assert labctl(busy_lab, "down", "--yes", "--discard").code == 0
    listed = labctl(busy_lab, "status").out
    assert "lost: labctl down removed its server" in listed
    assert "unknown" not in listed


def test_a_run_is_not_beside_itself(busy_lab: World, labctl: Labctl) -> None:
    assert "beside" not in labctl(busy_lab, "run", "--detach", "--id", "r3").err


def test_other_runs_cost_no_request_of_their_own(
    busy_lab: World, run_machine: RunMachine, labctl: Labctl
) -> None:
    run_machine.verbs.clear()
    labctl(busy_lab, "run")
    assert "status" not in run_machine.verbs


def test_of_many_active_runs_the_newest_are_named(
    busy_lab: World, run_machine: RunMachine, labctl: Labctl
) -> None:
    for number in range(4, 8):
        run_machine.put_run(f"r{number}")
    context = busy_lab.context()
    runs.refresh(context, context.get_server())
    text = labctl(busy_lab, "run", "--detach").err.replace("\n", " ")
    assert "runs r7, r6, r5 and 2 more are still running on this server" in text
    assert "started beside them   labctl logs -f r7   follow r7" in text


@pytest.mark.parametrize("typed", ["nigth", "ni", "night-2"])
def test_a_misspelled_run_is_corrected(
    run_lab: World, run_machine: RunMachine, labctl: Labctl, typed: str
) -> None:
    run_machine.put_run("night")
    context = run_lab.context()
    runs.refresh(context, context.get_server())
    output = labctl(run_lab, "cancel", typed)
    question = f"labctl: there is no run {typed}; did you mean night?\n"
    assert output.err == f"{question}  next: labctl cancel night\n"
    for before, after in [(("exec",), ("--", "ls", typed)), (("logs", "-n", "5"), ())]:
        words = " ".join([*before, "night", *after])
        output = labctl(run_lab, *before, typed, *after)
        assert output.err == f"{question}  next: labctl {words}\n"
    assert labctl(run_lab, "cancel", "morning").err.endswith("next: labctl status --all\n")


def test_the_push_of_a_run_names_the_command_that_was_typed(run_lab: World, labctl: Labctl) -> None:
    """A second terminal shows the holder of the lock: "has been running `run`"."""
    note = run_lab.home / "lab" / ".labctl" / "transfer.lock"
    for command in ("run", "push", "run"):  # before the first run and after it
        assert labctl(run_lab, command).code == 0
        assert json.loads(note.read_bytes())["what"] == command


def test_a_cancel_names_the_runs_that_are_still_active(
    busy_lab: World, run_machine: RunMachine, labctl: Labctl
) -> None:
    run_machine.put_run("r4", has_checkpoints=True)
    context = busy_lab.context()
    runs.refresh(context, context.get_server())
    output = labctl(busy_lab, "cancel")
    assert output.out == "run r4: canceled (SIGTERM)\n"
    others = "run r3 is still running; to stop r3: labctl cancel r3\n"
    assert output.err == _describe_results("r4") + others
    again = labctl(busy_lab, "cancel")
    assert again.out == "run r4 had already ended: canceled (SIGTERM)\n"
    assert again.err == others
    assert labctl(busy_lab, "cancel", "r3").err == "labctl pull r3    download its logs\n"


def _describe_results(run: str) -> str:
    return (
        f"labctl pull {run}    download its checkpoints and logs\n"
        "A new run continues from them with this line below data: in lab.yaml:\n"
        f"  start: ./runs/{run}/checkpoints\n"
    )


@pytest.mark.parametrize(
    ("recovers", "keeper", "command"),
    [
        (False, "", "labctl logs -f r3   "),
        (True, "", "labctl run --recover --id r3   follow it again, and recover it\n"),
        (True, "lab-pi", "labctl logs -f r3   "),  # the keeper recovers it
    ],
)
def test_ctrl_c_names_the_command_that_goes_on_recovering_the_run(
    busy_lab: World, capsys: pytest.CaptureFixture[str], recovers: bool, keeper: str, command: str
) -> None:
    context = busy_lab.context()
    lab: Any = SimpleNamespace(context=context, keeper=keeper)
    (run,) = context.state.list_runs(LAB_ID)
    if keeper:
        context.state.record(HANDED, lab_id=LAB_ID, run_id=run.id, detail={"keeper": keeper})
    _print_still_running(lab, run, recovers=recovers)
    said = capsys.readouterr().err
    assert f"  {command}" in said
    assert ("The keeper at lab-pi watches over it" in said) is bool(keeper)


def test_a_run_that_was_not_handed_over_is_not_said_to_be_watched(
    busy_lab: World, capsys: pytest.CaptureFixture[str]
) -> None:
    context = busy_lab.context()
    context.state.record(HANDED, lab_id=LAB_ID, run_id="other", detail={"keeper": "lab-pi"})
    lab: Any = SimpleNamespace(context=context, keeper="lab-pi")
    (run,) = context.state.list_runs(LAB_ID)
    _print_still_running(lab, run, recovers=False)
    assert "watches over it" not in capsys.readouterr().err

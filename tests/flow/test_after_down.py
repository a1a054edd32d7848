"""`labctl pull` and `labctl cancel` after the lab's server has ended."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest
from lab_world import LAB_ID, Labctl, World

from labctl.lifecycle import forget, up
from labctl.lifecycle.down import down
from labctl.model import Run
from labctl.servers.context import LabContext


def put_run(context: LabContext, run_id: str, state: str = "running") -> None:
    server = context.get_server()
    context.state.save_run(
        Run(id=run_id, lab_id=LAB_ID, server_id=server.id, state=state, created_at=1.0)  # type: ignore[arg-type]
    )


def end_server(lab: World) -> None:
    """End the server as its deadline does, and notice that."""
    for server_id in list(lab.cloud.machines):
        lab.cloud.terminate(server_id)


@pytest.fixture
def pulled(lab: World) -> World:
    """A lab without a server, whose run "night" was downloaded by `labctl down`."""
    up.up(lab.context())
    lab.machine.run_with("night", **{"model.bin": "weights"})
    down(lab.context(), discard=False)
    return lab


def test_a_pull_after_down_says_that_everything_is_here(
    pulled: World, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pulled.home / "lab")
    nothing_new = "runs/night: Nothing new; everything is up to date.\n"
    text = "the server of night was removed after everything on it had been downloaded\n"
    for words in (("pull",), ("pull", "night"), ("pull", "--follow")):
        output = labctl(pulled, *words)
        assert (output.code, output.out, output.err) == (0, nothing_new, text), words


def test_a_pull_of_what_was_deleted_here_is_an_error(pulled: World, labctl: Labctl) -> None:
    shutil.rmtree(pulled.home / "lab" / "runs" / "night")
    output = labctl(pulled, "pull")
    assert (output.code, output.out) == (4, "")
    assert "digits has no server" in output.err


def test_a_pull_after_another_end_of_the_server_names_what_is_here(
    lab: World, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab.home / "lab" / "src").mkdir()
    monkeypatch.chdir(lab.home / "lab" / "src")
    up.up(lab.context())
    lab.machine.run_with("night", **{"model.bin": "weights"})
    assert labctl(lab, "pull", "--runs").code == 0
    end_server(lab)
    labctl(lab, "status", "--refresh")
    output = labctl(lab, "pull", "night")
    assert output.code == 4
    assert "the results of night are on this machine, in runs/night\n" in output.err
    assert output.err.endswith("next: ls ../runs/night\n")


def test_a_pull_of_every_run_names_the_runs_that_are_here(
    pulled: World, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pulled.home / "lab")
    runs = pulled.home / "lab" / "runs"
    shutil.copytree(runs / "night", runs / "later")
    record = runs / "later" / "run.json"
    record.write_text(record.read_text().replace("night", "later"))
    context = pulled.context()
    (night,) = context.state.list_runs(LAB_ID)
    later = msgspec.structs.replace(night, id="later", created_at=1.0, server_id="another")
    context.state.save_run(later)
    output = labctl(pulled, "pull", "--runs")
    assert "what was downloaded of night, later is on this machine, in runs/\n" in output.err
    assert output.err.endswith("next: ls runs\n")


def test_results_that_are_not_here_are_not_named(lab: World, labctl: Labctl) -> None:
    up.up(lab.context())
    put_run(lab.context(), "night", state="exited")
    end_server(lab)
    labctl(lab, "status", "--refresh")
    output = labctl(lab, "pull")
    assert output.code == 4
    assert "runs/" not in output.err


def test_an_attach_points_to_the_log_that_is_here(pulled: World, labctl: Labctl) -> None:
    output = labctl(pulled, "attach")
    assert (output.code, output.err.splitlines()[-1]) == (255, "  next: labctl up")
    log = pulled.home / "lab" / "runs" / "night" / "logs" / "run.log"
    log.parent.mkdir()
    log.touch()
    output = labctl(pulled, "attach")
    assert (output.code, output.err.splitlines()[-1]) == (255, "  next: labctl logs night")
    up.up(pulled.context())
    shutil.rmtree(pulled.machine.home / "labctl/digits/runs/night")
    output = labctl(pulled, "attach")
    assert "does not exist on this server" in output.err
    assert (output.code, output.err.splitlines()[-1]) == (255, "  next: labctl logs night")


def test_an_evaluation_on_a_new_server_says_that_the_runs_server_has_ended(
    pulled: World, labctl: Labctl
) -> None:
    up.up(pulled.context())
    shutil.rmtree(pulled.machine.home / "labctl/digits/runs/night")
    output = labctl(pulled, "eval", "--on-server", "night")
    assert "labctl: the server of run night has ended\n" in output.err
    assert "  next: labctl run" in output.err


def test_an_evaluation_after_only_the_logs_were_downloaded_names_the_pull(
    lab: World, labctl: Labctl
) -> None:
    """As by `labctl explain` or `labctl report`."""
    up.up(lab.context())
    lab.machine.run_with("night", **{"best.pth": "weights"})
    put_run(lab.context(), "night", "cancelled")
    root = lab.home / "lab"
    (root / "evaluate.py").touch()
    (root / "runs" / "night" / "logs").mkdir(parents=True)
    output = labctl(lab, "eval")
    assert output.code == 4
    assert output.err == (
        "labctl: run night was not pulled to this machine\n  next: labctl pull night\n"
    )


@pytest.mark.parametrize("with_new_server", [False, True])
def test_a_cancel_says_that_the_run_has_ended_with_its_server(
    run_lab: World, labctl: Labctl, with_new_server: bool
) -> None:
    put_run(run_lab.context(), "night")
    end_server(run_lab)
    labctl(run_lab, "status", "--refresh")
    if with_new_server:
        up.up(run_lab.context())
    output = labctl(run_lab, "cancel", "night")
    assert (output.code, output.out) == (0, "run night has ended with its server.\n")
    assert json.loads(labctl(run_lab, "cancel", "night", "--json").out)["already"] is True


def test_a_cancel_does_not_say_so_of_a_server_that_was_only_forgotten(
    lab: World, labctl: Labctl
) -> None:
    server = up.up(lab.context())
    put_run(lab.context(), "night")
    context = lab.context()
    context.state.drop_server(server.id)
    forget.note_forgotten(context, LAB_ID, server.id)
    output = labctl(lab, "cancel", "night")
    assert (output.code, output.out) == (4, "")
    assert "digits has no server" in output.err

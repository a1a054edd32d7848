"""A lab whose data is already on the server: a missing directory is named before a run begins."""

from __future__ import annotations

import pytest
from lab_world import LAB_ID, Recorded, World

from labctl.errors import NotFoundError
from labctl.lifecycle import recover, restore
from labctl.lifecycle.up import up
from labctl.sync import lab_files
from labctl.wire.runs import RunSpec

GONE = "the server has no directory /no-datasets/birds"


@pytest.fixture
def birds(lab: World) -> World:
    text = "lab: digits\nrun: [python, train.py]\ndata: {birds: server:/no-datasets/birds}\n"
    (lab.home / "lab" / "lab.yaml").write_text(text)
    return lab


def test_up_warns_and_the_server_can_be_used(birds: World) -> None:
    reporter = Recorded()
    server = up(birds.context(reporter))
    assert server.state == "running"
    assert f"no run can start yet: {GONE}" in reporter.said
    next_lines = "  next: labctl ssh -- ls /\n        (then fix data: in lab.yaml)"
    assert next_lines in reporter.said


def test_a_push_fails_before_it_sends_the_data(birds: World) -> None:
    up(birds.context())
    context = birds.context()
    server = context.get_server()
    with pytest.raises(NotFoundError) as raised:
        lab_files.push_data(context, server)
    assert raised.value.what == GONE
    assert "lab.yaml names it for the data set birds" in raised.value.why
    assert raised.value.hint == "labctl ssh -- ls /   # then fix data: in lab.yaml"
    assert not (birds.machine.home / "labctl/digits/data").exists()


def test_a_lab_without_such_data_makes_no_call_for_it(lab: World) -> None:
    up(lab.context())
    lab.machine.lines.clear()
    context = lab.context()
    lab_files.check_server_data(context, context.get_server())
    assert lab.machine.lines == []


def test_a_recovery_says_that_the_new_server_lacks_the_directory_and_what_it_costs(
    birds: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    birds.cloud.price = 0.5
    spec = RunSpec("night", "digits", LAB_ID, command=("true",), image="x", env={})
    saved = restore.SavedRun(spec=spec, run=None)
    monkeypatch.setattr(restore, "read_saved_run", lambda context, run_id: saved)
    monkeypatch.setattr(restore, "restore", lambda context, server, run_id: 1)
    monkeypatch.setattr(recover.runs, "fetch_run", lambda context, server, run_id: None)
    with pytest.raises(NotFoundError) as raised:
        recover.recover(birds.context(), "night")
    assert raised.value.what == GONE
    assert "is still running (last known), at $0.50/h until labctl down" in raised.value.why

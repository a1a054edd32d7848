"""`labctl down` of a lab with several servers: one question about all of them, before any ends."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest
from lab_world import LAB_ID, DiskCloud, Recorded, World, world

from labctl.config.member_ids import make_member_id
from labctl.errors import BusyError, ConnectError, LabError, PolicyError
from labctl.events import Question
from labctl.lifecycle import down, gang_creation, run_server, up
from labctl.model import Resource, Run, Server
from labctl.servers import gang, reachability


@pytest.fixture
def lab(tmp_path: Path) -> World:
    made = world(tmp_path, DiskCloud)
    made.cloud.settle_s = 0.0
    write_count(made, 3)
    context = made.context()
    gang_creation.create_missing_servers(context, gang.build_members(context))
    return made


def write_count(lab: World, count: int) -> None:
    text = f"lab: digits\nrun: [python, train.py]\nserver: {{count: {count}}}\n"
    (lab.home / "lab" / "lab.yaml").write_text(text)


def forget_servers(lab: World) -> None:
    """Leave nothing on record, as on a second laptop."""
    context = lab.context()
    context.state.close()
    context.state.path.unlink()


def save_run(lab: World, run_id: str) -> None:
    context = lab.context()
    server = context.get_server()
    run = Run(
        id=run_id,
        lab_id=LAB_ID,
        server_id=server.id,
        command=("sleep", "9"),
        created_at=1.0,
        state="running",
    )
    context.state.save_run(run)


@pytest.mark.parametrize("count", [3, 2, 1])
def test_servers_that_are_not_on_record_are_in_the_question(lab: World, count: int) -> None:
    forget_servers(lab)
    write_count(lab, count)
    reporter = Recorded(answers=[False])
    with pytest.raises(PolicyError, match="nothing was removed"):
        down.down(lab.context(reporter), discard=True)
    (question,) = reporter.asked
    assert "digits, digits-1, digits-2" in question.question
    assert len(lab.cloud.machines) == 3


def test_a_server_that_appears_after_the_question_is_not_removed(lab: World) -> None:
    class LateServer(Recorded):
        def confirm(self, decision: Question) -> bool:
            lab.cloud.add("srv-late", "digits-1", make_member_id(LAB_ID, 1))
            return super().confirm(decision)

    second = lab.context().state.get_lab_server(make_member_id(LAB_ID, 1))
    assert second is not None
    lab.cloud.terminate(second.id)
    with pytest.raises(PolicyError) as caught:
        down.down(lab.context(LateServer()), discard=True)
    assert "srv-late appeared only after" in caught.value.why
    assert list(lab.cloud.machines) == ["srv-late"]
    down.down(lab.context(), discard=True)
    assert not lab.cloud.machines


def test_down_waits_for_a_server_whose_reply_was_lost(lab: World) -> None:
    second = lab.context().state.get_lab_server(make_member_id(LAB_ID, 1))
    assert second is not None
    lab.cloud.terminate(second.id)
    context = lab.context()
    lab.cloud.create_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        gang_creation.create_missing_servers(context, gang.build_members(context))
    lab.cloud.create_error = None
    lab.cloud.settle_s = 5.0

    def appear() -> None:
        lab.cloud.add("srv-late", "digits-1", make_member_id(LAB_ID, 1))

    timer = threading.Timer(0.5, appear)
    timer.start()
    reporter = Recorded()
    down.down(lab.context(reporter), discard=True)
    timer.join()
    (question,) = reporter.asked
    assert "digits-1" in question.question
    assert not lab.cloud.machines


def test_down_waits_for_up_and_up_for_down(lab: World) -> None:
    context = lab.context()
    with context.state.lock(f"{LAB_ID}-servers", "up"), pytest.raises(BusyError):
        down.down(lab.context(), discard=True, wait_s=0.1)
    assert len(lab.cloud.machines) == 3

    def create() -> None:
        with pytest.raises(BusyError), context.state.lock(f"{LAB_ID}-servers", "up", wait_s=0.1):
            pass

    class Prompt(Recorded):
        def confirm(self, decision: Question) -> bool:
            create()
            return super().confirm(decision)

    prompt = Prompt()
    down.down(lab.context(prompt), discard=True)
    assert prompt.asked


def test_run_down_keeps_all_servers_while_one_of_them_is_used(lab: World) -> None:
    save_run(lab, "other")
    with pytest.raises(run_server.ServerInUseError) as caught:
        run_server.end_unused(lab.context(), is_own=True)
    assert "other is still running" in caught.value.why
    assert len(lab.cloud.machines) == 3


def test_run_down_removes_the_others_if_the_first_is_gone(lab: World) -> None:
    first = lab.context().get_server()
    lab.cloud.terminate(first.id)
    run_server.end_unused(lab.context(), is_own=True, server_id=first.id)
    assert not lab.cloud.machines


@pytest.mark.parametrize("count", [1, 2])
def test_up_names_the_servers_that_lab_yaml_no_longer_asks_for(lab: World, count: int) -> None:
    write_count(lab, count)
    reporter = Recorded()
    with suppress(LabError):  # nothing answers on these servers
        up.up(lab.context(reporter))
    names = "digits-1, digits-2 are" if count == 1 else "digits-2 is"
    expected = f"{names} still running (free), but lab.yaml asks for {count} of the lab's servers"
    assert expected in reporter.said
    assert "next: labctl down\n        (removes all of them)" in reporter.said


def test_servers_that_up_removes_again_leave_nothing_that_they_share(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server ends first: what it shares then waits for the others."""
    others_may_end = threading.Event()
    list_servers, terminate = lab.cloud.servers, lab.cloud.terminate

    def list_and_release() -> list[Server]:
        listed = list_servers()
        if all(one.lab_id != LAB_ID for one in listed):
            others_may_end.set()
        return listed

    def terminate_first_server_first(server_id: str) -> None:
        if lab.cloud.machines[server_id].lab_id != LAB_ID:
            assert others_may_end.wait(30)
        terminate(server_id)

    lab.cloud.left = [Resource(provider="cloud", kind="key-pair", id="key", lab_id=LAB_ID)]
    monkeypatch.setattr(lab.cloud, "servers", list_and_release)
    monkeypatch.setattr(lab.cloud, "terminate", terminate_first_server_first)
    monkeypatch.setattr(reachability, "SSH_DEADLINE_S", 0.1)
    lab.machine.error = ConnectError("nobody answers")
    with pytest.raises(ConnectError):
        up.up(lab.context())
    assert not lab.cloud.machines
    assert not lab.cloud.left

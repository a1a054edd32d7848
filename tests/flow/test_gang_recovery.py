"""What a keeper does with a run on two servers, by what becomes of its processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from gang_keeper_bed import SECOND_ID
from gang_runs_bed import LAB_YAML, Gang, make_gang, wait_until
from keeper_context import HOST
from lab_world import Recorded

from labctl.errors import ConnectError
from labctl.keeper.labs import ENDED, TROUBLE, WELL
from labctl.lifecycle import cancel, gang_follow, gang_runs
from labctl.lifecycle.gang_outcome import RECOVERED


@pytest.fixture
def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    with make_gang(tmp_path, monkeypatch) as made:
        yield made


def end_well(gang: Gang) -> None:
    """The last attempt ends; nothing is left to do then."""
    gang.signal("done")
    wait_until(lambda: gang.check() == ENDED)
    assert [gang.record(rank)["exit_code"] for rank in (0, 1)] == [0, 0]


@pytest.mark.long
def test_a_process_that_hangs_ends_the_run_and_all_start_again(gang: Gang) -> None:
    gang.start()
    assert gang.check() == WELL
    for rank in (1, 0):
        os.kill(gang.list_begun(rank)[-1], signal.SIGSTOP)
    wait_until(lambda: gang.check() == TROUBLE)
    gang.recover()
    gang.await_begin(2)
    (reason,) = gang.list_restarts()
    assert reason.startswith("stalled: no rank has shown any progress for ")
    assert "; the last was rank " in reason
    assert gang.check() == WELL
    end_well(gang)


@pytest.mark.parametrize(
    ("verbs", "begun"),
    [
        # Both parts are ended, like those of a program that has failed.
        (["cancel", "cancel"], [2, 2]),
        # One part is created, the other one is not.
        (["resume"], [2, 2]),
        # One part has started, and the first one waits. The next recovery ends it.
        (["resume", "resume", "start-held"], [2, 3]),
    ],
)
@pytest.mark.long
def test_a_recovery_that_is_cut_off_halfway_is_completed(
    gang: Gang, verbs: list[str], begun: list[int]
) -> None:
    path = gang.two.lab.home / "lab" / "lab.yaml"
    path.write_text(LAB_YAML.replace("restarts: 1", "restarts: 0"))
    gang.start()
    lost = gang.server(1).id
    gang.lose(1)
    gang.machine.cut_after = verbs
    with pytest.raises(ConnectError):
        gang.recover()
    gang.machine.error = None
    assert gang.check() == TROUBLE
    assert gang.list_restarts(RECOVERED) == []
    gang.recover()
    wait_until(lambda: [len(gang.list_begun(rank)) for rank in (0, 1)] == begun)
    assert gang.list_restarts(RECOVERED) == [f"digits-1: the server {lost} is gone"]
    assert gang.list_restarts() == []
    end_well(gang)


def test_the_other_part_ends_when_a_limit_has_stopped_one(gang: Gang) -> None:
    gang.start()
    run = gang.directory(1) / "runs" / "night"
    (run / ".labctl" / "limit.json").write_text(json.dumps({"by": "ttl", "at": time.time()}))
    os.kill(os.getpgid(gang.list_begun(1)[-1]), signal.SIGTERM)
    wait_until(lambda: not gang.is_alive(1))
    wait_until(lambda: gang.check() == ENDED)
    assert not gang.is_alive(0)
    assert gang.record(0)["told"] == f"ttl ended {gang.server(1).id}"
    assert gang.record(1)["stopped_by"] == "ttl"
    assert len(gang.list_begun(0)) == 1


def test_cancel_ends_the_part_on_a_server_that_the_keeper_has_put_in_place(gang: Gang) -> None:
    gang.start()
    lost = gang.cloud.machines.pop(gang.server(1).id)
    new = msgspec.structs.replace(lost, id="srv-new")
    gang.cloud.machines[new.id] = new
    gang.machine.silent.add(lost.id)
    laptop = gang.two.lab.context()
    run, had_ended = cancel.cancel(laptop, "night", 1)
    assert (run.state, had_ended) == ("cancelled", False)
    assert not gang.is_alive(0)
    assert not gang.is_alive(1)
    part = laptop.state.get_run(SECOND_ID, "night")
    assert part is not None
    assert (part.server_id, part.state) == (new.id, "cancelled")


def test_beside_a_keeper_in_the_same_account_the_log_goes_on_during_a_recovery(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_follow, "KEEPER_POLL_S", 0.1)
    gang.start()
    log = bytearray()
    reporter = Recorded()
    context = gang.two.lab.context(reporter)
    context = msgspec.structs.replace(
        context, shared_provider=gang.cloud, shared_connections=context.connections
    )

    def end_run() -> None:
        wait_until(lambda: any(line.endswith(" follow") for line in gang.machine.lines))
        gang.signal("done")

    with gang_runs.hold_watch(context, "recover night"):
        Thread(target=end_run, daemon=True).start()
        run = gang_follow.follow(context, "night", recovers=False, on_log=log.extend)
    assert (run.state, run.exit_code) == ("exited", 0)
    assert log.startswith(b"begin\nstep\n")
    assert f"the keeper at {HOST} watches over night; this only shows its log" in reporter.said

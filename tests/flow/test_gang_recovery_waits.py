"""A keeper that waits for a silent server: for how long, and how its user ends that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gang_runs_bed import Gang, make_gang, wait_until
from keeper_context import HOST, NAME
from lab_world import Recorded

from labctl.errors import BusyError, LabError
from labctl.keeper.labs import ENDED, TROUBLE
from labctl.lifecycle import cancel, down, gang_recovery, gang_restart, kept_labs, recovery_wait
from labctl.lifecycle.gang_outcome import RECOVERED


@pytest.fixture
def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    monkeypatch.setattr(gang_restart, "POLL_S", 0.1)
    with make_gang(tmp_path, monkeypatch) as made:
        made.start()
        yield made


def test_cancel_ends_the_wait_for_a_silent_server(gang: Gang) -> None:
    gang.unplug(1)
    with gang.recovering():
        with pytest.raises(LabError) as caught:
            cancel.cancel(gang.two.lab.context(), "night", 1)
        assert "the run may still be active on digits-1" in caught.value.why
    assert gang.list_restarts() == gang.list_restarts(RECOVERED) == []
    assert len(gang.cloud.machines) == 2
    assert len(gang.list_begun(0)) == 1
    gang.plug_in(1)
    cancel.cancel(gang.two.lab.context(), "night", 1)
    assert gang.check() == ENDED
    assert not gang.is_alive(1)


def test_down_ends_the_wait_for_a_silent_server(gang: Gang) -> None:
    gang.unplug(1)
    reporter = Recorded()
    with gang.recovering():
        down.down(gang.two.lab.context(reporter), discard=True)
    assert gang.cloud.machines == {}
    assert not gang.two.ward.exists()
    assert "may create another server" not in reporter.said
    assert list(gang.two.places.keep_dir.glob(f".locks/{NAME}.*")) == []


def test_down_says_what_a_recovery_that_must_not_be_interrupted_does(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_labs, "DROP_S", 0.1)
    context = gang.two.kept()
    with (
        kept_labs.lock_kept_lab(gang.two.places, NAME, "keep"),
        recovery_wait.report_activity(context, "recovering its runs"),
        recovery_wait.report_activity(context, "starting night again", 600),
    ):
        begun = time.strftime("%H:%M", time.gmtime())
        with pytest.raises(BusyError) as caught:
            down.down(gang.two.lab.context(), discard=False)
    error = caught.value
    assert error.exit_code == 75
    assert error.what == f"the keeper at {HOST} is recovering digits right now"
    assert f"since {begun}" in error.why
    assert " UTC, it has been starting night again, until " in error.why
    assert error.hint == "labctl down   # again, in a few minutes"
    assert len(gang.cloud.machines) == 2
    assert gang.two.ward.exists()


@pytest.mark.long
@pytest.mark.parametrize("phase", ["answer", "conclusion"])
def test_the_wait_ends_by_itself_and_the_next_one_completes_the_recovery(
    gang: Gang, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    gang.unplug(1)
    if phase == "answer":
        gang.unplug(0)  # while no server answers, the keeper's own network may be down
        monkeypatch.setattr(gang_recovery, "DEAD_S", 1.0)
        monkeypatch.setattr(gang_recovery, "MARGIN_S", 0.0)
    else:
        monkeypatch.setattr(gang_restart, "CONCLUSION_S", 1.0)
    with pytest.raises(BusyError) as caught:
        gang.recover()
    names = "digits, digits-1 do" if phase == "answer" else "digits-1 does"
    assert caught.value.what == f"{names} not answer"
    assert "labctl cancel night" in caught.value.hint
    for rank in (0, 1) if phase == "answer" else (1,):
        gang.plug_in(rank)
    assert gang.check() == (TROUBLE if phase == "conclusion" else "well")
    gang.recover()
    if phase == "conclusion":
        gang.await_begin(2)
        assert len(gang.list_restarts(RECOVERED)) == 1
    gang.signal("done")
    wait_until(lambda: gang.check() == ENDED)

"""`--keeper localhost`: the keeper of one's own account, which shares all records with its user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from keeper_context import HOST, NAME, Pair, handed_to, pair
from lab_world import LAB_ID, world

from labctl.lifecycle import down, kept_labs, recovery_lock
from labctl.lifecycle.recovery_lock import RecoveryLockedError


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    lab = world(tmp_path)
    lab.cloud.settle_s = 0.0
    root = lab.home / "lab"
    (root / ".labctl").mkdir()
    (root / ".labctl" / "lab.json").write_text(json.dumps({"id": LAB_ID}))
    made = pair(lab, lab.home, monkeypatch)
    made.hand_over()
    return made


def test_only_the_keeper_recovers(own: Pair) -> None:
    with recovery_lock.hold_recovery_lock(own.kept(), "night", wait=False):
        pass
    with (
        pytest.raises(RecoveryLockedError, match=f"exported to the keeper at {HOST}"),
        recovery_lock.hold_recovery_lock(own.lab.context(), "night", wait=False),
    ):
        pass


def test_what_is_no_longer_watched_is_still_its_users(own: Pair) -> None:
    kept_labs.drop(own.places, own.state, NAME)
    context = own.lab.context()
    assert context.get_server().id == own.server().id
    assert context.identity.is_file()


def test_down_saves_the_results_after_the_keeper_has_gone(own: Pair) -> None:
    own.lab.machine.run_with("night", **{"model.pt": "weights"})
    down.down(own.lab.context(), discard=False)
    assert (own.lab.home / "lab/runs/night/checkpoints/model.pt").read_text() == "weights"
    assert not own.cloud.machines
    assert handed_to(own.lab) == ""
    assert own.state.list_servers() == []

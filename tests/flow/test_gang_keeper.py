"""A lab with several servers goes to a keeper with all of them; one machine alone acts on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gang_keeper_bed import (
    LAB_YAML,
    RESTARTS,
    SECOND_ID,
    check,
    make_two,
    put_parts,
    save_part,
    second,
)
from keeper_context import HOST, NAME, Pair, cut, handed_to
from lab_world import LAB_ID, Recorded

from labctl.config import set_secret, trust
from labctl.errors import BusyError, CapacityError, NotFoundError, PolicyError, UsageError
from labctl.events import RepeatedNote
from labctl.keeper.labs import ENDED, SWEPT, TROUBLE, WELL, describe_kept_labs
from labctl.keeper.recovery_worker import recover_lab
from labctl.lab import Lab
from labctl.lifecycle import (
    cancel,
    down,
    gang_follow,
    gang_keeper,
    gang_outcome,
    gang_restart,
    gang_runs,
    kept_labs,
    reconcile,
    spending_policy,
)
from labctl.lifecycle.gang_watch import PartFailure
from labctl.lifecycle.keeper_host import ANSWER_S
from labctl.lifecycle.recovery_lock import find_keeper
from labctl.runs import runs
from labctl.state.ledgers import CANCELED
from labctl.transports.fake import FakeTransport
from labctl.wire.run_ids import BANDWIDTH_PREFIX


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return make_two(tmp_path, monkeypatch)


# Going and coming back


def test_the_keeper_gets_all_servers_with_their_parts_and_one_key(two: Pair) -> None:
    laptop = two.lab.context().state
    laptop.record("ready", lab_id=SECOND_ID, server_id=second(two).id)
    two.hand_over()
    kept = two.kept()
    (first_member, second_member) = kept_labs.build_members(kept)
    assert second_member.get_server().id == second(two).id
    assert second_member.get_server().endpoint.identity == str(first_member.identity)
    assert first_member.identity.read_bytes() == two.lab.context().identity.read_bytes()
    assert [run.id for run in kept.state.list_runs(SECOND_ID)] == ["night"]
    assert kept.state.list_events(lab_id=SECOND_ID, kind="ready")
    assert gang_runs.count_parts(kept, "night") == 2
    (listed,) = describe_kept_labs(two.places, two.state)
    assert [server.id for server in listed.servers] == [
        two.lab.context().get_server().id,
        second(two).id,
    ]
    assert find_keeper(two.lab.context(), "night") == HOST
    assert find_keeper(two.lab.context(), "other") == ""


def test_a_server_that_the_keeper_cannot_see_leaves_nothing_there(two: Pair) -> None:
    two.cloud.terminate(second(two).id)
    with pytest.raises(NotFoundError, match="cannot keep this lab: cloud does not list server"):
        two.hand_over()
    assert handed_to(two.lab) == ""
    assert not two.ward.exists()


def test_what_happened_on_every_server_comes_back(two: Pair) -> None:
    two.hand_over()
    save_part(two.state, 1, "exited", 7)
    two.state.record("created", lab_id=SECOND_ID, server_id="srv-new", detail={"price": 1})
    laptop = two.lab.context()
    assert reconcile.merge_keeper_records(laptop) == HOST
    part = laptop.state.get_run(SECOND_ID, "night")
    assert part is not None
    assert part.exit_code == 7
    assert laptop.state.list_events(lab_id=SECOND_ID, server_id="srv-new", kind="created")


def test_dropped_nothing_of_any_server_stays_there(two: Pair) -> None:
    two.hand_over()
    kept_labs.drop(two.places, two.state, NAME)
    assert two.state.list_servers() == []
    assert not (two.places.keys_dir / LAB_ID).exists()


def test_down_first_makes_the_keeper_forget_the_lab(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.hand_over()
    terminate = two.cloud.terminate

    def check_and_terminate(server_id: str) -> None:
        assert not two.ward.exists(), "the keeper would replace it"
        terminate(server_id)

    monkeypatch.setattr(two.cloud, "terminate", check_and_terminate)
    two.error = cut()
    with pytest.raises(PolicyError, match="cannot reach the keeper"):
        down.down(two.lab.context(), discard=False)
    assert len(two.cloud.machines) == 2
    two.error = None
    down.down(two.lab.context(), discard=True)
    assert not two.cloud.machines
    assert handed_to(two.lab) == ""


# One machine acts


def test_cancel_tells_the_keeper_or_says_that_it_could_not(two: Pair) -> None:
    two.hand_over()
    put_parts(two, 1, 1)
    two.error = cut()
    reporter = Recorded()
    cancel.cancel(two.lab.context(reporter), "night", 1)
    assert f"cannot tell the keeper at {HOST}" in reporter.said
    assert check(two) == TROUBLE
    two.error = None
    cancel.cancel(two.lab.context(), "night", 1)
    assert check(two) == ENDED


def test_a_canceled_run_that_is_handed_over_again_is_recovered(two: Pair) -> None:
    two.hand_over()
    put_parts(two, 1, 1)
    cancel.cancel(two.lab.context(), "night", 1)
    assert check(two) == ENDED
    two.hand_over()
    assert check(two) == TROUBLE
    assert not gang_outcome.is_over(two.lab.context(), "night")
    cancel.cancel(two.lab.context(), "night", 1)
    assert check(two) == ENDED
    assert gang_outcome.is_over(two.lab.context(), "night")


def test_this_machine_does_not_recover_what_a_keeper_recovers(two: Pair) -> None:
    two.hand_over()
    context = two.lab.context()
    with pytest.raises(UsageError) as caught:
        gang_keeper.require_one_watcher(context, "", recover=True, keeper="")
    assert caught.value.hint == f"labctl run --recover --keeper {HOST}"
    gang_keeper.require_one_watcher(context, "", recover=False, keeper="")
    with pytest.raises(PolicyError, match="night is not started again from here"):
        gang_keeper.require_not_kept(context, "night")
    gang_keeper.require_not_kept(context, "other")


def test_a_lab_whose_run_is_followed_here_is_not_handed_over(two: Pair) -> None:
    context = two.lab.context()
    with gang_runs.hold_watch(context, "follow night"), pytest.raises(BusyError) as caught:
        gang_keeper.require_one_watcher(two.lab.context(), "", recover=True, keeper=HOST)
    assert "cannot be handed over" in caught.value.what
    gang_keeper.require_one_watcher(context, "", recover=True, keeper=HOST)


def test_a_run_on_more_servers_than_lab_yaml_has_is_not_handed_over(two: Pair) -> None:
    root = two.lab.home / "lab"
    context = two.lab.context()
    context.state.record(gang_runs.PARTS, lab_id=LAB_ID, run_id="wide", detail={"count": 4})
    with pytest.raises(UsageError, match="wide cannot be handed over"):
        gang_keeper.require_one_watcher(context, "wide", recover=True, keeper=HOST)
    assert (root / "lab.yaml").exists()


# Checks


@pytest.mark.parametrize(
    ("parts", "restarts", "is_over"),
    [
        ([("exited", 0), ("exited", 0)], 0, True),
        ([("exited", 0), ("running", None)], 0, False),
        # What a failure elsewhere has ended starts again.
        ([("exited", 143), ("exited", 7)], 0, False),
        ([("exited", 143), ("exited", 7)], RESTARTS, True),
        # A lost server is replaced, however often the run has started again.
        ([("exited", 143), ("lost", None)], RESTARTS, False),
        ([("exited", 143), ("running", None)], RESTARTS, False),
        ([("cancelled", 143), ("running", None)], 0, True),
        ([("running", None), ("lost", None, "ttl")], 0, True),
    ],
)
def test_a_run_is_over_when_no_attempt_can_follow(
    two: Pair, parts: list[tuple[str, int | None]], restarts: int, is_over: bool
) -> None:
    context = two.lab.context()
    for rank, part in enumerate(parts):
        save_part(context.state, rank, *part)
    for _ in range(restarts):
        context.state.record(gang_outcome.RESTARTED, lab_id=LAB_ID, run_id="night")
    assert gang_outcome.is_over(context, "night") is is_over
    assert kept_labs.is_over(context, "night") is is_over


def test_a_run_that_measures_something_is_over_when_it_has_failed(two: Pair) -> None:
    context, run_id = two.lab.context(), f"{BANDWIDTH_PREFIX}1"
    context.state.record(gang_runs.PARTS, lab_id=LAB_ID, run_id=run_id, detail={"count": 2})
    for rank, code in enumerate((143, 7)):
        save_part(context.state, rank, "exited", code, run_id=run_id)
    assert gang_outcome.is_over(context, run_id)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([("exited", 0), ("exited", 0)], 0),
        ([("exited", 0), ("exited", 3)], 3),
        ([("cancelled", 143), ("exited", 3)], 143),
        ([("exited", 143), ("lost", None, "ttl")], 143),
    ],
)
def test_the_exit_code_of_a_run_is_that_of_the_part_that_failed(
    two: Pair, parts: list[tuple[str, int | None]], code: int
) -> None:
    context = two.lab.context()
    for rank, part in enumerate(parts):
        save_part(context.state, rank, *part)
    assert gang_outcome.save_outcome(context, "night").exit_code == code


def test_a_failed_part_needs_a_worker_until_no_restart_is_left(two: Pair) -> None:
    two.hand_over()
    put_parts(two, 143, 7)
    assert check(two) == TROUBLE
    for _ in range(RESTARTS):
        two.state.record(gang_outcome.RESTARTED, lab_id=LAB_ID, run_id="night")
    assert check(two) == ENDED


def test_a_missing_server_needs_a_worker_while_a_run_is_open(two: Pair) -> None:
    two.hand_over()
    put_parts(two, 143, 0)
    two.state.drop_server(second(two).id)
    assert check(two) == TROUBLE
    put_parts(two, 0, 0)
    assert check(two) == TROUBLE, "nobody knows how the second part ended"
    save_part(two.state, 1, "exited", 0)
    assert check(two) == ENDED


def test_after_the_run_all_servers_are_swept(two: Pair) -> None:
    two.hand_over()
    put_parts(two, 0, 0)
    assert check(two) == ENDED
    for server in list(two.cloud.machines):
        two.cloud.terminate(server)
    two.lab.machine.error = cut()
    assert check(two) == TROUBLE
    recover_lab(two.kept(), kept_labs.find_kept_lab(two.places, NAME))
    assert two.state.list_servers() == []
    assert [event.lab_id for event in two.state.list_events(kind=SWEPT)] == [SECOND_ID, LAB_ID]
    assert check(two, swept=True) == SWEPT


def test_a_server_that_cannot_be_replaced_now_is_an_error_and_tried_again(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker must not wait for a free machine: `labctl down` would wait for the worker."""
    monkeypatch.setattr(gang_restart, "is_reachable", lambda *_: True)
    context = two.lab.context()
    spending_policy.record_price_limit(context, context.get_server(), "night")
    two.hand_over()
    put_parts(two, 143, 0)
    lost = second(two).id
    two.cloud.terminate(lost)
    two.state.drop_server(lost)
    two.cloud.create_error = CapacityError("no machine left")
    kept = kept_labs.find_kept_lab(two.places, NAME)
    with pytest.raises(CapacityError):
        recover_lab(two.kept(), kept)
    assert check(two) == TROUBLE
    assert not two.state.list_events(lab_id=LAB_ID, kind="recovered")
    # What its user cancels meanwhile is not tried again.
    two.state.record(CANCELED, lab_id=LAB_ID, run_id="night")
    two.cloud.create_error = None
    recover_lab(two.kept(), kept)
    assert len(two.cloud.machines) == 1


def test_a_restart_that_was_interrupted_needs_a_worker_until_it_is_canceled(two: Pair) -> None:
    """All parts may be created then, and wait for one another."""
    two.hand_over()
    put_parts(two, 0, 0)
    for name in ("digits", "digits-1"):
        path = two.lab.machine.home / f"labctl/{name}/runs/night/.labctl/record.json"
        path.write_text('{"id": "night", "state": "claimed"}')
    assert check(two) == WELL
    failure = PartFailure(rank=1, reason="digits-1: exit code 7")
    gang_outcome.record_restart_begun(two.kept(), "night", failure)
    assert check(two) == TROUBLE
    two.state.record(CANCELED, lab_id=LAB_ID, run_id="night")
    assert check(two) == ENDED


def test_every_server_gets_the_secrets_of_the_lab(two: Pair) -> None:
    (two.lab.home / "lab" / "lab.yaml").write_text(f"{LAB_YAML}secrets: [TOKEN]\n")
    context = two.lab.context()
    set_secret(two.lab.places, LAB_ID, "TOKEN", "shown-nowhere")
    trust(two.lab.places, context.config)
    two.hand_over()
    for own in (context, two.kept()):
        for member in kept_labs.build_members(own):
            assert runs.read_secrets(member) == {"TOKEN": "shown-nowhere"}


# What a keeper has changed meanwhile


def test_cancel_knows_when_the_keeper_no_longer_has_the_lab(two: Pair) -> None:
    two.hand_over()
    put_parts(two, 1, 1)
    kept_labs.drop(two.places, two.state, NAME)
    reporter = Recorded()
    cancel.cancel(two.lab.context(reporter), "night", 1)
    assert f"{HOST} no longer keeps digits" in reporter.said
    assert "may start night again" not in reporter.said
    assert find_keeper(two.lab.context(), "night") == ""


def test_a_request_to_the_keeper_has_a_limit_and_an_import_none(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float | None] = {}
    stream = FakeTransport.stream

    def note_limit(self: FakeTransport, line: str, **named: Any) -> int:
        limits[line.partition("labctl keep --")[2].split()[0]] = named.get("timeout_s")
        return stream(self, line, **named)

    monkeypatch.setattr(FakeTransport, "stream", note_limit)
    two.hand_over()
    put_parts(two, 1, 1)
    cancel.cancel(two.lab.context(), "night", 1)
    assert limits["cancel"] == ANSWER_S
    assert limits["add"] is None


def test_nothing_is_swept_while_a_server_beside_the_first_is_alive(two: Pair) -> None:
    two.hand_over()
    put_parts(two, 0, 0)
    assert check(two) == ENDED
    two.cloud.terminate(two.lab.context().get_server().id)
    recover_lab(two.kept(), kept_labs.find_kept_lab(two.places, NAME))
    assert not two.state.list_events(kind=SWEPT)


def test_the_wait_for_a_keeper_in_trouble_says_why(two: Pair) -> None:
    two.hand_over()
    failed = kept_labs.KeeperCheck(at=1.0, state=TROUBLE, error="no credentials for cloud")
    kept_labs.write_checks(two.places, {NAME: failed})
    reporter = Recorded()
    gang_follow._find_next_attempt(two.lab.context(reporter), HOST, "night")
    told = [event.text for event in reporter.events if isinstance(event, RepeatedNote)]
    assert f"the keeper at {HOST} reports: no credentials for cloud" in told


def test_with_one_server_in_lab_yaml_a_run_on_two_is_not_handed_over(two: Pair) -> None:
    (two.lab.home / "lab" / "lab.yaml").write_text("lab: digits\nrun: [python, train.py]\n")
    context = two.lab.context()
    trust(two.lab.places, context.config)
    with pytest.raises(UsageError, match="night cannot be handed over"):
        Lab(context).run(["python", "train.py"], id="night", recover=True, keeper=HOST)

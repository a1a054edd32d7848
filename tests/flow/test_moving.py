"""move: the lab gets another server, and at every step it keeps one with its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab_world import LAB_ID, RunMachine, unreachable
from market_bed import MarketWorld, make_market

from labctl import providers
from labctl.agent import reply
from labctl.errors import (
    CapacityError,
    InterruptError,
    LabError,
    LinkLostError,
    LockHeldError,
    NotFoundError,
    PolicyError,
    UsageError,
)
from labctl.lifecycle import move as lab_move
from labctl.lifecycle import moved_runs, recover, restore
from labctl.lifecycle.down import down
from labctl.lifecycle.move import MoveResult
from labctl.lifecycle.recovery_lock import RecoveryLockedError
from labctl.lifecycle.status import read_status
from labctl.model import ProviderAccount, Server
from labctl.providers import auto
from labctl.servers import attempts
from labctl.state.ledgers import HANDED
from labctl.transports import Result
from labctl.wire.runs import RunSpec


class MoveMachine(RunMachine):
    """It also resumes scripted runs, and takes those that are pushed to it."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.resume_error: LabError | None = None
        self.resumed: list[str] = []

    def _answer(self, line: str, stdin: bytes) -> Result:
        verb = line.split()[-1]
        if self.error is None and verb in ("resume", "restore-pushed"):
            self.verbs.append(verb)
            request = json.loads(stdin.split(b"\n")[0])
            return self._resume(request) if verb == "resume" else self._adopt(request)
        return super()._answer(line, stdin)

    def _resume(self, request: dict[str, Any]) -> Result:
        if self.resume_error is not None:
            raise self.resume_error
        run_id = request["spec"]["id"]
        found = self.runs[run_id]["state"] == "running"
        self.runs[run_id]["state"] = "running"
        self.resumed.append(f"{run_id} gpus={request['spec']['gpus']!r}")
        return _reply({"run": self.runs[run_id], "found": found})

    def _adopt(self, request: dict[str, Any]) -> Result:
        self.put_run(request["spec"]["id"], state="lost", told="lost")
        return _reply({"run": self.runs[request["spec"]["id"]]})

    def _cancel(self, request: dict[str, Any]) -> Result:
        run = self.runs[request["run"]]
        if request.get("moves") and run["state"] != "running":
            return _reply({"run": run, "already": True})
        if request.get("moves"):
            self.runs[run["id"]] = run = {**run, "state": "lost", "told": "stopped to move"}
            return _reply({"run": run, "already": False})
        return super()._cancel(request)


def _reply(record: dict[str, Any]) -> Result:
    return Result(code=0, stdout=reply.encode_line(record).decode())


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MarketWorld:
    """A lab with a server at beta."""
    for name in ("alpha", "beta"):
        monkeypatch.setitem(providers.BUILT_IN, name, f"market_bed:{name.capitalize()}")
    monkeypatch.setattr(auto, "list_provider_names", lambda: ["alpha", "auto", "beta"])
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.2)
    market = make_market(tmp_path)
    market.machines = {name: MoveMachine(tmp_path / name) for name in ("alpha", "beta")}
    market.write("{provider: beta}")
    (market.home / "lab" / "train.py").write_text("print('trains')\n")
    market.up()
    return market


def move(clouds: MarketWorld, provider: str = "alpha", **overrides: str) -> MoveResult:
    lab = clouds.load(**overrides)
    return lab_move.move(lab.context, lab.config.server.need if overrides else None, provider)


def get_server(clouds: MarketWorld) -> Server:
    server = clouds.state.get_lab_server(LAB_ID)
    assert server is not None
    return server


def start_run(clouds: MarketWorld, run_id: str = "night") -> None:
    """A run that goes on at beta, and whose code is here, as `run --recover` keeps it."""
    context = clouds.context()
    spec = RunSpec(
        id=run_id, lab="digits", lab_id=LAB_ID, command=("true",), image="small:1", env={}
    )
    restore.keep_code(context, spec)
    machine = clouds.machines["beta"]
    assert isinstance(machine, MoveMachine)
    machine.put_run(run_id)


def list_running(clouds: MarketWorld) -> list[str]:
    return [
        f"{run_id} at {name}"
        for name, machine in clouds.machines.items()
        if isinstance(machine, MoveMachine)
        for run_id, run in machine.runs.items()
        if run["state"] == "running"
    ]


def test_a_run_goes_on_at_the_new_server_and_the_old_one_ends(clouds: MarketWorld) -> None:
    start_run(clouds)
    old = get_server(clouds)
    result = move(clouds)
    assert (result.former.id, result.server.provider, result.resumed) == (
        old.id, "alpha", ("night",),
    )  # fmt: skip
    assert clouds.list_servers() == ["alpha small"]
    assert list_running(clouds) == ["night at alpha"]
    (question,) = [one for one in clouds.reporter.asked if one.about == "price"]
    assert "beta small on demand ($0.40/h) to alpha small on demand ($0.50/h)" in question.question
    assert "night is stopped with a checkpoint, and resumed on the new server" in question.detail
    server = get_server(clouds)
    assert (server.id, server.alias, server.moving) == (result.server.id, "digits", "")
    assert clouds.context().provider.name == "alpha", "later commands, although lab.yaml says beta"
    assert [one.id for one in clouds.state.list_servers(LAB_ID)] == [server.id]
    recovered = clouds.state.list_events(lab_id=LAB_ID, kind="recovered")
    assert [line.server_id for line in recovered] == [server.id]
    down(clouds.context(), discard=True)
    assert clouds.list_servers() == []


def test_results_are_here_before_the_old_server_ends(clouds: MarketWorld) -> None:
    clouds.machines["beta"].run_with("before", **{"model.pt": "weights"})
    result = move(clouds)
    assert result.saved.results == 1
    assert (clouds.home / "lab/runs/before/checkpoints/model.pt").read_text() == "weights"
    assert clouds.list_servers() == ["alpha small"]


def test_costs_that_nothing_ends_last_until_down(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the move is over, `labctl move --cancel` removes nothing any more."""
    start_run(clouds)
    monkeypatch.setattr(type(clouds.alpha), "ends_billing", frozenset(), raising=False)
    move(clouds)
    (question,) = [one for one in clouds.reporter.asked if one.about == "billing"]
    assert "until labctl down" in question.detail
    assert "--cancel" not in question.detail


def test_a_user_who_declines_changes_nothing(clouds: MarketWorld) -> None:
    start_run(clouds)
    lab = clouds.load()
    clouds.reporter.answers = [False]
    with pytest.raises(PolicyError) as caught:
        lab_move.move(lab.context, None, "alpha")
    assert "digits is on digits (beta small" in caught.value.why
    assert list_running(clouds) == ["night at beta"]
    with pytest.raises(UsageError, match="to move to"):
        move(clouds, "")


def test_no_capacity_leaves_the_old_server(clouds: MarketWorld) -> None:
    clouds.alpha.create_error = CapacityError("full")
    with pytest.raises(CapacityError):
        move(clouds)
    assert clouds.list_servers() == ["beta small"]
    assert get_server(clouds).provider == "beta"


def test_a_new_server_that_never_answers_is_removed_again(clouds: MarketWorld) -> None:
    start_run(clouds)
    clouds.machines["alpha"].error = unreachable()
    with pytest.raises(LabError) as caught:
        move(clouds)
    assert "removed again" in caught.value.why
    assert clouds.list_servers() == ["beta small"]
    assert list_running(clouds) == ["night at beta"]


def test_a_run_that_cannot_resume_goes_on_at_the_old_server(clouds: MarketWorld) -> None:
    start_run(clouds)
    machine = clouds.machines["alpha"]
    assert isinstance(machine, MoveMachine)
    machine.resume_error = PolicyError("no such GPU")
    with pytest.raises(PolicyError, match="no such GPU") as caught:
        move(clouds)
    assert list_running(clouds) == ["night at beta"]
    assert "the new server" in caught.value.why
    assert "labctl move --cancel" in caught.value.hint
    assert clouds.list_servers() == ["alpha small", "beta small"]
    status = read_status(clouds.context(), refresh=False)
    assert [server.provider for server in status.moving] == ["alpha"]
    assert status.server is not None
    assert status.server.provider == "beta"
    machine.resume_error = None
    assert move(clouds, "").resumed == ("night",)
    assert list_running(clouds) == ["night at alpha"]
    assert clouds.list_servers() == ["alpha small"]


def test_an_unfinished_move_is_given_up(clouds: MarketWorld) -> None:
    start_run(clouds)
    machine = clouds.machines["alpha"]
    assert isinstance(machine, MoveMachine)
    machine.resume_error = PolicyError("no such GPU")
    with pytest.raises(PolicyError):
        move(clouds)
    with pytest.raises(UsageError, match="unfinished move"):
        move(clouds, "beta")
    canceled = clouds.load().cancel_move()
    assert canceled.removed
    assert clouds.list_servers() == ["beta small"]
    assert list_running(clouds) == ["night at beta"]
    with pytest.raises(NotFoundError, match="no unfinished move"):
        clouds.load().cancel_move()


def test_down_ends_both_servers(clouds: MarketWorld) -> None:
    start_run(clouds)
    machine = clouds.machines["alpha"]
    assert isinstance(machine, MoveMachine)
    machine.resume_error = PolicyError("no such GPU")
    with pytest.raises(PolicyError):
        move(clouds)
    down(clouds.context(), discard=True)
    assert clouds.list_servers() == []
    assert clouds.state.list_servers(LAB_ID) == []


def test_a_lost_reply_is_repeated_and_makes_one_server(clouds: MarketWorld) -> None:
    clouds.alpha.loses_reply = True
    with pytest.raises(LinkLostError) as caught:
        move(clouds)
    assert "a new small may exist at alpha" in caught.value.why
    clouds.up()
    assert clouds.state.list_open_attempts(LAB_ID) != [], "the lab's own server settles nothing"
    status = read_status(clouds.context(), refresh=True)
    assert [server.provider for server in status.moving] == ["alpha"]
    assert status.server is not None
    assert status.server.provider == "beta"
    assert move(clouds, "").server.provider == "alpha"
    assert clouds.list_servers() == ["alpha small"]
    assert clouds.state.list_open_attempts(LAB_ID) == []


def test_down_finds_a_server_whose_reply_was_lost(clouds: MarketWorld) -> None:
    clouds.alpha.loses_reply = True
    with pytest.raises(LinkLostError):
        move(clouds)
    down(clouds.context(), discard=True)
    assert clouds.list_servers() == []
    assert clouds.state.list_open_attempts(LAB_ID) == []


# The steps of a move, with those after which it is always interrupted; the others with --long.
STEPS: list[tuple[Any, str, bool]] = [
    (lab_move.first_run, "push_with_image", False),
    (moved_runs, "stop_runs", True),
    (moved_runs, "save_all", False),
    (moved_runs, "resume_runs", True),
    (lab_move, "cut_over", True),
    (lab_move, "_finish", False),
]
INTERRUPTS = [
    pytest.param(
        (module, name),
        is_after,
        id=f"{'after' if is_after else 'before'} {name}",
        marks=() if is_after and is_tested else pytest.mark.long,
    )
    for module, name, is_tested in STEPS
    for is_after in (False, True)
]


@pytest.mark.parametrize(("step", "is_after"), INTERRUPTS)
def test_an_interrupted_move_goes_on(
    clouds: MarketWorld,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[Any, str],
    is_after: bool,
) -> None:
    start_run(clouds)
    module, name = step
    genuine: Callable[..., Any] = getattr(module, name)

    def interrupted(*words: Any, **options: Any) -> Any:
        if is_after:
            genuine(*words, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupted)
        with pytest.raises(InterruptError) as caught:
            move(clouds)
    assert "labctl move" in caught.value.hint
    assert len(list_running(clouds)) == 1, "the run goes on somewhere"
    if name == "_finish" and is_after:
        assert clouds.list_servers() == ["alpha small"]
        return
    move(clouds, "")
    assert list_running(clouds) == ["night at alpha"]
    assert clouds.list_servers() == ["alpha small"]
    assert [one.moving for one in clouds.state.list_servers(LAB_ID)] == [""]


def test_a_killed_move_goes_on(clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is undone after kill -9: the run waits for the next move, or for its end."""
    start_run(clouds)
    with monkeypatch.context() as patch:
        patch.setattr(moved_runs, "return_runs", lambda *_: [])
        patch.setattr(moved_runs, "save_all", _kill)
        with pytest.raises(InterruptError):
            move(clouds)
    assert list_running(clouds) == []
    assert move(clouds, "").resumed == ("night",)
    assert list_running(clouds) == ["night at alpha"]


def _kill(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_killed_move_is_given_up(clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    start_run(clouds)
    with monkeypatch.context() as patch:
        patch.setattr(moved_runs, "return_runs", lambda *_: [])
        patch.setattr(moved_runs, "save_all", _kill)
        with pytest.raises(InterruptError):
            move(clouds)
    assert clouds.load().cancel_move().returned == ("night",)
    assert list_running(clouds) == ["night at beta"]
    assert clouds.list_servers() == ["beta small"]


def test_a_run_that_a_killed_move_has_resumed_is_not_recovered_twice(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(clouds)
    with monkeypatch.context() as patch:
        patch.setattr(moved_runs, "return_runs", lambda *_: [])
        patch.setattr(lab_move, "cut_over", _kill)
        with pytest.raises(InterruptError):
            move(clouds)
    assert list_running(clouds) == ["night at alpha"]
    with pytest.raises(RecoveryLockedError, match="unfinished move"):
        recover.recover(clouds.context(), "night")
    move(clouds, "")
    assert list_running(clouds) == ["night at alpha"]
    assert clouds.list_servers() == ["alpha small"]


def test_a_recovery_that_waited_for_a_move_uses_the_new_provider(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(clouds)
    follower = clouds.context()
    hold = recover.hold_recovery_lock

    @contextmanager
    def hold_after_move(*words: Any, **options: Any) -> Iterator[Any]:
        move(clouds)
        with hold(*words, **options) as lock:
            yield lock

    monkeypatch.setattr(recover, "hold_recovery_lock", hold_after_move)
    assert recover.recover(follower, "night").server_id == get_server(clouds).id
    assert list_running(clouds) == ["night at alpha"]
    assert clouds.list_servers() == ["alpha small"]
    assert len(clouds.state.list_events(lab_id=LAB_ID, kind="recovered")) == 1


@pytest.mark.parametrize("ended", ["beta", "alpha"])
def test_a_server_that_ends_during_a_move_leaves_the_other(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lab_move.first_run, "push_with_image", _kill)
        with pytest.raises(InterruptError):
            move(clouds)
    cloud = clouds.clouds[ended]
    for server_id in list(cloud.machines):
        cloud.change(server_id, state="terminated")
        cloud.ended[server_id] = cloud.machines.pop(server_id)
    result = move(clouds, "")
    assert result.server.provider == "alpha"
    assert clouds.list_servers() == ["alpha small"]
    assert [one.moving for one in clouds.state.list_servers(LAB_ID)] == [""]


def test_another_account_is_refused(clouds: MarketWorld) -> None:
    down(clouds.context(), discard=True)
    clouds.beta.account = ProviderAccount(id="one")
    clouds.up()
    clouds.beta.account = ProviderAccount(id="two")
    with pytest.raises(PolicyError, match="belongs to beta account one"):
        move(clouds)
    assert clouds.list_servers() == ["beta small"]


def test_a_keeper_and_several_servers_are_refused(clouds: MarketWorld) -> None:
    clouds.state.record(HANDED, lab_id=LAB_ID, run_id="night", detail={"keeper": "host"})
    with pytest.raises(PolicyError, match="was not moved") as caught:
        move(clouds)
    assert "keeper at host" in caught.value.why
    clouds.write("{provider: beta, count: 2}")
    with pytest.raises(UsageError, match="one server"):
        move(clouds)


def test_one_move_at_a_time(clouds: MarketWorld) -> None:
    with clouds.state.lock(f"{LAB_ID}-move", "move"), pytest.raises(LockHeldError):
        move(clouds)


def test_the_cheapest_of_all_is_taken_where_lab_yaml_says_auto(clouds: MarketWorld) -> None:
    clouds.write("{provider: auto}")
    clouds.alpha.kinds, clouds.alpha.price = ["large"], 0.1
    result = move(clouds, "", type="large")
    assert (result.server.provider, result.server.offer.type) == ("alpha", "large")
    assert clouds.context().config.server.candidates == ("auto",)

"""status without the network; what a run is before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from lab_world import LAB_ID, DiskCloud, Labctl, Recorded, World, unreachable, world

from labctl.errors import (
    BusyError,
    ConnectError,
    InterruptError,
    NotFoundError,
    PolicyError,
    UsageError,
)
from labctl.lifecycle import up
from labctl.lifecycle.extend import extend
from labctl.lifecycle.status import read_status
from labctl.model import ProviderAccount, Run, Server
from labctl.runs import run_specs, runs
from labctl.servers import guard
from labctl.wire.codec import to_json
from labctl.wire.watchdog import WatchRecord


class Untouchable:
    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was used")


def test_status_asks_nobody(lab: World) -> None:
    lab.cloud.price = 0.5
    server = up.up(lab.context())
    context = lab.context(Recorded())
    context.__dict__["provider"] = context.__dict__["connections"] = Untouchable()
    said = read_status(context, refresh=False)
    assert said.server.id == server.id
    assert said.reachable is None
    assert said.clocks is not None
    assert said.clocks.enforced is False
    assert 0 <= said.cost_usd < 0.01


@pytest.mark.parametrize("price", [0.0, 0.5])
def test_status_says_that_nothing_calls_for_a_watchdog(lab: World, price: float) -> None:
    lab.cloud.price = price
    up.up(lab.context())
    assert not read_status(lab.context(), refresh=False).is_unguarded
    status = read_status(lab.context(), refresh=True, why=True)
    assert status.reachable is True
    assert status.is_unguarded is (price == 0)


class ExplainingCloud(DiskCloud):
    reason = ""

    def explain_end(self, server_id: str) -> str:
        return self.reason


def test_the_reason_of_an_end_may_be_known_later(tmp_path: Path) -> None:
    """A keeper notices that a server has ended within a minute, and its student at once."""
    lab = world(tmp_path, ExplainingCloud)

    def end_server(server: Server) -> str:
        lab.cloud.change(server.id, state="terminated")
        return read_end()

    def read_end() -> str:
        refreshed = read_status(lab.context(), refresh=True)
        assert refreshed.server is None
        assert read_status(lab.context(), refresh=False).last_end == refreshed.last_end
        return str(refreshed.last_end)

    assert isinstance(lab.cloud, ExplainingCloud)
    server = up.up(lab.context())
    assert end_server(server) == ""
    lab.cloud.reason = "nothing ran there"
    assert read_end() == "nothing ran there"
    # The last one counts, with a reason or without.
    lab.cloud.reason = "its time was over"
    other = up.up(lab.context())
    assert end_server(other) == "its time was over"
    ended = read_status(lab.context(), refresh=False).ended
    assert ended == {server.id: "nothing ran there", other.id: "its time was over"}
    lab.cloud.reason = ""
    assert end_server(up.up(lab.context())) == ""


@pytest.mark.parametrize(("price", "why"), [(0.0, ""), (0.5, " and cost money")])
def test_status_after_an_interrupted_up_says_that_there_may_be_a_server(
    lab: World, price: float, why: str
) -> None:
    lab.cloud.price = price
    lab.cloud.interrupt_after_create = True
    with pytest.raises(InterruptError) as error:
        up.up(lab.context())
    assert error.value.why == f"the server may already exist{why}"
    status = read_status(lab.context(), refresh=False)
    assert (status.server, status.unfinished_up) == (None, True)
    lab.cloud.interrupt_after_create = False
    up.up(lab.context())
    assert not read_status(lab.context(), refresh=False).unfinished_up


def test_an_up_that_was_interrupted_before_its_request_has_left_nothing(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> list[Server]:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab.cloud, "servers", interrupt)
    with pytest.raises(InterruptError) as error:
        up.up(lab.context())
    assert error.value.why == "no server was requested"
    assert error.value.hint == "labctl up   # continues"
    assert not read_status(lab.context(), refresh=False).unfinished_up


def _interrupt_before_create(lab: World) -> None:
    """Leave an open attempt, of which no server ever appears."""
    lab.cloud.create_error = KeyboardInterrupt()
    with pytest.raises(InterruptError):
        up.up(lab.context())
    lab.cloud.create_error = None


def test_a_refresh_that_finds_no_server_ends_the_doubt(lab: World, labctl: Labctl) -> None:
    _interrupt_before_create(lab)
    lab.cloud.settle_s = 0.0
    assert "an interrupted labctl up may have created one" in labctl(lab, "status").out
    assert labctl(lab, "status", "--refresh").out == "digits: no server\n  next: labctl up\n"
    assert labctl(lab, "status").out == "digits: no server\n  next: labctl up\n"


def test_a_server_may_appear_later_than_the_refresh(lab: World) -> None:
    _interrupt_before_create(lab)
    assert read_status(lab.context(), refresh=True).unfinished_up
    assert len(lab.context().state.list_open_attempts()) == 1


def test_the_attempt_of_an_up_that_is_at_work_stays_open(lab: World) -> None:
    _interrupt_before_create(lab)
    lab.cloud.settle_s = 0.0
    with lab.context().state.lock(LAB_ID, "up"):
        read_status(lab.context(), refresh=True)
    assert len(lab.context().state.list_open_attempts()) == 1


def test_an_attempt_with_other_credentials_stays_open(lab: World) -> None:
    lab.cloud.account = ProviderAccount(id="1111")
    _interrupt_before_create(lab)
    lab.cloud.settle_s = 0.0
    lab.cloud.account = ProviderAccount(id="2222")
    with pytest.raises(PolicyError):
        read_status(lab.context(), refresh=True)
    assert len(lab.context().state.list_open_attempts()) == 1


def test_refresh_asks_and_says_when_nobody_answers(lab: World) -> None:
    up.up(lab.context())
    lab.machine.run_with("night")
    said = read_status(lab.context(), refresh=True)
    assert said.reachable is True
    assert [run.id for run in said.runs] == ["night"]
    assert said.disk is not None
    assert said.disk.free_bytes > 0
    lab.machine.error = unreachable()
    said = read_status(lab.context(), refresh=True)
    assert (said.reachable, said.why) == (False, "no answer")


@pytest.mark.parametrize("cause", ["no answer", "digits has no address"])
def test_a_server_that_is_not_reachable_comes_with_the_next_commands(
    lab: World, labctl: Labctl, cause: str
) -> None:
    server = up.up(lab.context())
    if cause == "no answer":
        lab.machine.error = unreachable()
    else:
        endpoint = msgspec.structs.replace(server.endpoint, host="")
        lab.cloud.change(server.id, endpoint=endpoint)
    assert labctl(lab, "status", "--refresh").out.startswith(
        f"digits: NOT REACHABLE, cloud small\n  {cause}\n"
        "  labctl up      connect again, or say why that fails\n"
        "  labctl down    remove the server\n"
    )


class CourseCloud(DiskCloud):
    """Servers of a course, whose keeper may be down."""

    is_down = False

    def get_guarded_lab_id(self, server_id: str) -> str:
        return "0123456789abcdef"

    def extend_life(self, server_id: str, span_s: int) -> None:
        raise AssertionError("nothing is extended here")

    def find(self, server_id: str) -> Server | None:
        self._require_keeper()
        return super().find(server_id)

    def servers(self) -> list[Server]:
        self._require_keeper()
        return super().servers()

    def _require_keeper(self) -> None:
        if self.is_down:
            raise BusyError("the course's keeper is not running")


def test_refresh_asks_the_server_itself_while_the_keeper_is_down(tmp_path: Path) -> None:
    lab = world(tmp_path, CourseCloud)
    assert isinstance(lab.cloud, CourseCloud)
    up.up(lab.context())
    lab.cloud.is_down = True
    lab.machine.run_with("night")
    said = read_status(lab.context(), refresh=True)
    assert said.provider_problem == "the course's keeper is not running"
    assert said.reachable is True
    assert [run.id for run in said.runs] == ["night"]
    lab.cloud.is_down = False
    assert read_status(lab.context(), refresh=True).provider_problem == ""


def test_more_time_is_what_status_shows_from_then_on(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    up.up(lab.context())
    watch = WatchRecord(alive=True, ttl_left_s=30_000.0)
    monkeypatch.setattr(guard, "extend", lambda context, server, span_s: watch)
    extend(lab.context(), 1800)
    assert read_status(lab.context(), refresh=False).watch == to_json(watch)


def test_refresh_drops_a_server_that_is_gone(lab: World) -> None:
    server = up.up(lab.context())
    lab.cloud.change(server.id, state="terminated")
    assert read_status(lab.context(), refresh=True).server is None


def test_a_lab_without_a_server(lab: World) -> None:
    said = read_status(lab.context(), refresh=False)
    assert (said.server, said.runs, said.cost_usd) == (None, (), 0.0)
    with pytest.raises(NotFoundError) as caught:
        lab.context().get_server()
    assert (caught.value.exit_code, caught.value.hint) == (4, "labctl up")


def test_what_a_run_is(lab: World) -> None:
    server = up.up(lab.context())
    context = lab.context()
    wanted = run_specs.build_spec(context, server, (), "night", False)
    assert wanted.command == ("python", "train.py")
    assert run_specs.build_spec(context, server, ("ls",), "night", False).command == ("ls",)
    for name in ("Night Run", "", "a\n", "x" * 40):
        with pytest.raises(UsageError) as caught:
            run_specs.build_spec(context, server, (), name, False)
        assert caught.value.hint.startswith("labctl run --id ")
    (lab.home / "lab" / "lab.yaml").write_text("lab: digits\n")
    with pytest.raises(UsageError, match="nothing to run") as refused:
        run_specs.build_spec(lab.context(), server, (), "night", False)
    assert "labctl forward jupyter" in refused.value.hint
    assert "the CMD of an image is not used" in refused.value.why


def test_names_made_for_runs_are_good_ones_and_differ() -> None:
    from labctl.model import NAME_PATTERN

    names = {run_specs.make_run_id() for _ in range(20)}
    assert all(NAME_PATTERN.fullmatch(name) for name in names)
    assert len(names) > 15


def test_a_log_is_followed_through_a_cut_link(lab: World) -> None:
    server = up.up(lab.context())
    directory = lab.machine.run_with("night")
    (directory / "logs" / "run.log").write_text("one\ntwo\n")
    reporter = Recorded(on_event=lambda event: setattr(lab.machine, "error", None))
    context = lab.context(reporter)
    lab.machine.error = unreachable()
    got = bytearray()
    run = runs.watch(context, server, "night", on_log=got.extend)
    assert (run.state, run.exit_code, run.summary) == ("exited", 0, "done")
    assert got == b"one\ntwo\n"
    assert "the run is still active" in reporter.said
    lab.machine.error = unreachable()
    with pytest.raises(ConnectError):
        runs.watch(context, server, "night", follow=False, on_log=got.extend)


def test_the_latest_run_and_one_that_is_not_there(lab: World) -> None:
    context = lab.context()
    with pytest.raises(NotFoundError, match="has no runs yet") as caught:
        runs.find_run(context)
    assert caught.value.hint == "labctl run --up"
    with pytest.raises(NotFoundError, match="has no runs yet"):
        runs.find_run(context, "nigth")
    up.up(context)
    with pytest.raises(NotFoundError) as caught:
        runs.find_run(context)
    assert caught.value.hint == "labctl run"
    for number, name in enumerate(("a", "b")):
        run = Run(id=name, lab_id=context.lab_id, server_id="s", state="exited", created_at=number)
        context.state.save_run(run)
    assert runs.find_run(context).id == "b"
    assert runs.find_run(context, "a").id == "a"
    with pytest.raises(NotFoundError, match="no run c"):
        runs.find_run(context, "c")

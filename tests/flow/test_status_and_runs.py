"""status without the network; what a run is before it starts."""

from __future__ import annotations

from typing import NoReturn

import pytest
from lab_ground import Recorded, World, unreachable

from labctl.errors import ConnectError, NotFoundError, UsageError
from labctl.lifecycle import up
from labctl.lifecycle.extend import extend
from labctl.lifecycle.status import read_status
from labctl.model import Run
from labctl.runs import runs
from labctl.servers import guard


class Untouchable:
    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was used")


def test_status_asks_nobody(lab: World) -> None:
    lab.cloud.price = 0.5
    server = up.up(lab.ground())
    ground = lab.ground(Recorded())
    ground.__dict__["provider"] = ground.__dict__["connections"] = Untouchable()
    said = read_status(ground, refresh=False)
    assert said["server"].id == server.id
    assert said["reachable"] is None
    assert said["clocks"]["enforced"] is False
    assert 0 <= said["cost_usd"] < 0.01


def test_refresh_asks_and_says_when_nobody_answers(lab: World) -> None:
    up.up(lab.ground())
    lab.machine.run_with("night")
    said = read_status(lab.ground(), refresh=True)
    assert said["reachable"] is True
    assert [run.id for run in said["runs"]] == ["night"]
    assert said["disk"]["free_bytes"] > 0
    lab.machine.error = unreachable()
    said = read_status(lab.ground(), refresh=True)
    assert (said["reachable"], said["why"]) == (False, "no answer")


def test_more_time_is_what_status_shows_from_then_on(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    up.up(lab.ground())
    watch = {"alive": True, "ttl_left_s": 30_000.0}
    monkeypatch.setattr(guard, "extend", lambda ground, server, span_s: watch)
    extend(lab.ground(), 1800)
    assert read_status(lab.ground(), refresh=False)["watch"] == watch


def test_refresh_drops_a_server_that_is_gone(lab: World) -> None:
    server = up.up(lab.ground())
    lab.cloud.change(server.id, state="terminated")
    assert read_status(lab.ground(), refresh=True)["server"] is None


def test_a_lab_without_a_server(lab: World) -> None:
    said = read_status(lab.ground(), refresh=False)
    assert (said["server"], said["runs"], said["cost_usd"]) == (None, [], 0.0)
    with pytest.raises(NotFoundError) as caught:
        lab.ground().get_server()
    assert (caught.value.exit_code, caught.value.hint) == (4, "labctl up")


def test_what_a_run_is(lab: World) -> None:
    server = up.up(lab.ground())
    ground = lab.ground()
    wanted = runs.build_spec(ground, server, (), "night", False)
    assert wanted.command == ("python", "train.py")
    assert runs.build_spec(ground, server, ("ls",), "night", False).command == ("ls",)
    for name in ("Night Run", "", "a\n", "x" * 40):
        with pytest.raises(UsageError) as caught:
            runs.build_spec(ground, server, (), name, False)
        assert caught.value.hint.startswith("labctl run --id ")
    (lab.home / "lab" / "lab.yaml").write_text("lab: digits\n")
    with pytest.raises(UsageError, match="nothing to run"):
        runs.build_spec(lab.ground(), server, (), "night", False)


def test_names_made_for_runs_are_good_ones_and_differ() -> None:
    from labctl.model import NAME_PATTERN

    names = {runs.make_run_id() for _ in range(20)}
    assert all(NAME_PATTERN.fullmatch(name) for name in names)
    assert len(names) > 15


def test_a_log_is_followed_through_a_cut_link(lab: World) -> None:
    server = up.up(lab.ground())
    directory = lab.machine.run_with("night")
    (directory / "logs" / "run.log").write_text("one\ntwo\n")
    reporter = Recorded(on_event=lambda event: setattr(lab.machine, "error", None))
    ground = lab.ground(reporter)
    lab.machine.error = unreachable()
    got = bytearray()
    run = runs.watch(ground, server, "night", on_log=got.extend)
    assert (run.state, run.exit_code, run.told) == ("exited", 0, "done")
    assert got == b"one\ntwo\n"
    assert "the run is still active" in reporter.said
    lab.machine.error = unreachable()
    with pytest.raises(ConnectError):
        runs.watch(ground, server, "night", follow=False, on_log=got.extend)


def test_the_latest_run_and_one_that_is_not_there(lab: World) -> None:
    ground = lab.ground()
    with pytest.raises(NotFoundError, match="has no runs yet"):
        runs.find_run(ground)
    for number, name in enumerate(("a", "b")):
        run = Run(id=name, lab_id=ground.lab_id, server_id="s", state="exited", created_at=number)
        ground.state.save_run(run)
    assert runs.find_run(ground).id == "b"
    assert runs.find_run(ground, "a").id == "a"
    with pytest.raises(NotFoundError, match="no run c"):
        runs.find_run(ground, "c")

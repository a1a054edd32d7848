"""A server's disk outlives its deadline where nothing else saves results; `down` removes both."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lab_world import LAB_ID, Cloud, DiskCloud, Recorded, World, unreachable, world

from labctl import retry
from labctl.errors import (
    ConnectError,
    DeniedError,
    LabError,
    LinkLostError,
    PolicyError,
    ThrottledError,
)
from labctl.lifecycle import reclaim_drill, reconcile, server_loss
from labctl.lifecycle import up as provision
from labctl.lifecycle.down import down
from labctl.lifecycle.extend import extend
from labctl.lifecycle.status import read_status
from labctl.model import Need, Resource, Run, Server
from labctl.servers import disk_retention, guard
from labctl.servers.agent import AgentClient
from labctl.servers.context import LabContext
from labctl.servers.leftovers import end_orphans, find_orphans
from labctl.state.disks import list_kept_disks
from labctl.sync import lab_files
from labctl.wire.runs import STATUS
from labctl.wire.verbs import Verb
from labctl.wire.watchdog import EXTEND, GUARD, GuardRequest, WatchRecord, WatchReply

ARM = guard.arm  # what conftest replaces, lest a watchdog end this machine
# Both are saved as bad%0Aname.
TWO_OF_ONE_NAME = ("bad\nname", "bad%0Aname")
DAY_S = 86_400.0
HOUR_S = 3600.0


class KeepCloud(Cloud):
    """Half a dollar an hour; its disks can outlive their servers."""

    can_keep_itself = False

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.price = 0.5
        self.kept_until: dict[str, float] = {}
        self.is_denied = False
        self.has_disks = True
        self.cannot_arm = False
        self.ttl_left_s: float | None = None
        self.takes_back = False
        self.release_errors: list[LabError] = []

    def keep_disk(self, server_id: str, expires_at: float) -> list[Resource]:
        self.calls.append("keep_disk")
        if self.is_denied:
            raise DeniedError("ec2:ModifyInstanceAttribute is not allowed")
        if not self.has_disks:
            return []
        self.kept_until[server_id] = expires_at
        return [
            Resource(
                provider=self.name,
                kind="volume",
                id="vol-1",
                lab_id=LAB_ID,
                price_usd_per_month=7.5,
                server_id=server_id,
                expires_at=expires_at,
            )
        ]

    def release_disk(self, server_id: str) -> None:
        self.calls.append("release_disk")
        if self.release_errors:
            raise self.release_errors.pop(0)
        self.kept_until.pop(server_id, None)

    def attach_kept_disk(self, resource: Resource, server_id: str) -> str:
        raise AssertionError("nothing is attached here")


class Watchdog:
    """Answers what a server's watchdog is asked; keeps what it was armed with."""

    def __init__(self, server: AgentClient, armed: list[GuardRequest], cloud: KeepCloud) -> None:
        self.server = server
        self.armed = armed
        self.cloud = cloud

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def call(self, verb: Verb[Any, Any], request: Any, **more: Any) -> Any:
        if verb is GUARD:
            if self.cloud.cannot_arm:
                raise unreachable()
            self.armed.append(request)
            ttl_left_s = self.cloud.ttl_left_s or request.limits.ttl_s
            return WatchReply(WatchRecord(alive=True, ttl_left_s=ttl_left_s))
        if verb is EXTEND:
            ttl_s = self.armed[-1].limits.ttl_s or 0.0
            return WatchReply(WatchRecord(alive=True, ttl_left_s=ttl_s + request.span_s))
        reply = self.server.call(verb, request, **more)
        if verb is STATUS and self.cloud.takes_back:
            taken = {"kind": "interruption", "ready_at": time.time(), "ends_at": time.time() + 60}
            return reply._replace(watch={"reclaim": taken})
        return reply


@pytest.fixture
def armed() -> list[GuardRequest]:
    """The requests that armed the watchdog."""
    return []


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, armed: list[GuardRequest]) -> World:
    remote = LabContext.open_agent
    monkeypatch.setattr(
        provision.first_contact, "replace_first_host_key", lambda context, *reached: reached
    )
    monkeypatch.setattr(guard, "arm", ARM)
    made = world(tmp_path, KeepCloud)
    cloud = cloud_of(made)
    monkeypatch.setattr(
        LabContext, "open_agent", lambda *args: Watchdog(remote(*args), armed, cloud)
    )
    return made


def cloud_of(lab: World) -> KeepCloud:
    assert isinstance(lab.cloud, KeepCloud)
    return lab.cloud


def up(lab: World, need: Need | None = None, reporter: Recorded | None = None) -> Server:
    return provision.up(lab.context(reporter, need or Need()))


@pytest.mark.parametrize(
    ("need", "hours"),
    [(Need(), 12), (Need(ttl_s=7200), 2), (Need(ttl_s=36_000, budget_usd=2.0), 4)],
)
def test_the_disk_stays_for_two_weeks_past_the_deadline_and_the_price_is_said(
    lab: World, armed: list[GuardRequest], need: Need, hours: int
) -> None:
    reporter = Recorded()
    server = up(lab, need, reporter)
    expected = time.time() + hours * HOUR_S + 14 * DAY_S
    assert cloud_of(lab).kept_until[server.id] == pytest.approx(expected, abs=60)
    assert "$7.50 a month" in reporter.said
    [plan] = [one.detail for one in reporter.asked if one.about == "price"]
    assert "its disk is kept for 14 days" in plan
    assert armed[-1].ending.disk == "stays"
    up(lab, need)
    assert cloud_of(lab).calls.count("keep_disk") == 1


def test_down_removes_the_disk_with_the_server(lab: World) -> None:
    up(lab)
    down(lab.context(), discard=False)
    calls = cloud_of(lab).calls
    assert calls.index("release_disk") < calls.index("terminate")
    assert cloud_of(lab).kept_until == {}


def test_a_disk_stays_where_down_could_not_save_what_is_on_it(lab: World) -> None:
    server = up(lab)
    lab.machine.run_with("night", model="weights")
    run = lab.machine.run_with("day")
    for name in TWO_OF_ONE_NAME:
        run.joinpath("checkpoints", name).write_text("weights")
    with pytest.raises(PolicyError, match="not everything on it could be saved"):
        down(lab.context(), discard=False)
    assert cloud_of(lab).machines == {}
    assert server.id in cloud_of(lab).kept_until
    assert "release_disk" not in cloud_of(lab).calls


def test_extend_moves_the_expiry_and_a_later_up_does_not_move_it_back(lab: World) -> None:
    server = up(lab, Need(ttl_s=7200, max_ttl_s=int(90 * DAY_S)))
    extend(lab.context(need=Need(ttl_s=7200)), int(30 * DAY_S))
    expected = time.time() + 2 * HOUR_S + 44 * DAY_S
    assert cloud_of(lab).kept_until[server.id] == pytest.approx(expected, abs=60)
    up(lab, Need(ttl_s=7200))
    assert cloud_of(lab).kept_until[server.id] == pytest.approx(expected, abs=60)


def test_a_deadline_that_another_machine_has_moved_moves_the_expiry(lab: World) -> None:
    server = up(lab, Need(ttl_s=7200))
    cloud_of(lab).ttl_left_s = 40 * DAY_S
    lab.places.database.unlink()
    up(lab, Need(ttl_s=7200))
    expected = time.time() + 54 * DAY_S
    assert cloud_of(lab).kept_until[server.id] == pytest.approx(expected, abs=60)


def test_without_a_deadline_the_disk_outlives_whatever_takes_the_server(lab: World) -> None:
    server = up(lab, Need(deadline=False))
    expected = time.time() + 44 * DAY_S
    assert cloud_of(lab).kept_until[server.id] == pytest.approx(expected, abs=60)


@pytest.mark.parametrize("command", ["status", "pull"])
def test_a_look_renews_the_expiry_that_a_server_without_deadline_comes_near(
    lab: World, command: str
) -> None:
    server = up(lab, Need(deadline=False))
    context = lab.context()
    soon = {"expires_at": time.time() + DAY_S}
    context.state.record(disk_retention.HELD, lab_id=LAB_ID, server_id=server.id, detail=soon)
    for _ in range(2):
        if command == "status":
            read_status(lab.context(), refresh=True)
        else:
            reconcile.pull(lab.context(), [], everything=False)
    expected = time.time() + 14 * DAY_S
    assert cloud_of(lab).kept_until[server.id] == pytest.approx(expected, abs=60)
    assert cloud_of(lab).calls.count("keep_disk") == 2


def test_a_disk_outlives_the_timer_that_a_stopped_server_has(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = up(lab)
    cloud = cloud_of(lab)
    for name in ("stop", "start"):
        # Not on the class: `isinstance(cloud, Stoppable)` would stay true for later tests.
        monkeypatch.setattr(cloud, name, partial(getattr(DiskCloud, name), cloud), raising=False)
    lab.machine.error = unreachable()
    with pytest.raises(PolicyError, match="not everything on it could be saved"):
        down(lab.context(), discard=False)
    assert cloud.machines[server.id].state == "stopped"
    assert cloud.kept_until[server.id] == pytest.approx(time.time() + 44 * DAY_S, abs=60)


def test_a_disk_is_let_go_once_a_store_saves_the_results(
    lab: World, armed: list[GuardRequest]
) -> None:
    server = up(lab)
    guard.arm(with_store(lab), server)
    assert cloud_of(lab).kept_until == {}
    assert armed[-1].ending.disk == "goes"


def test_a_bucket_that_the_server_may_not_write_to_saves_nothing(
    lab: World, armed: list[GuardRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = up(lab)
    guard.arm(with_store(lab, "s3://bucket/digits"), server)
    assert server.id in cloud_of(lab).kept_until
    assert armed[-1].ending.disk == "stays"
    monkeypatch.setattr(cloud_of(lab), "can_keep_itself", True)
    guard.arm(with_store(lab, "s3://bucket/digits"), server)
    assert cloud_of(lab).kept_until == {}
    assert armed[-1].ending.disk == "keepable"


def with_store(lab: World, url: str = "ssh://ann@store/labs") -> LabContext:
    context = lab.context()
    config = msgspec.structs.replace(context.config, store=url)
    stored = msgspec.structs.replace(context, config=config)
    stored.__dict__.update(context.__dict__)  # the provider and the connections of the world
    return stored


def test_a_disk_is_not_let_go_before_the_watchdog_knows_the_store(lab: World) -> None:
    server = up(lab)
    cloud_of(lab).cannot_arm = True
    with pytest.raises(ConnectError):
        guard.arm(with_store(lab), server)
    assert server.id in cloud_of(lab).kept_until


def test_a_server_from_before_its_lab_had_a_profile_still_has_its_disk_kept(
    lab: World, armed: list[GuardRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = up(lab, Need(ttl_s=7200, max_ttl_s=int(90 * DAY_S)))
    monkeypatch.setattr(cloud_of(lab), "can_keep_itself", True)
    guard.arm(lab.context(need=Need(ttl_s=7200)), server)
    assert armed[-1].ending.disk == "stays"
    extend(lab.context(need=Need(ttl_s=7200)), int(30 * DAY_S))
    expected = time.time() + 2 * HOUR_S + 44 * DAY_S
    assert cloud_of(lab).kept_until[server.id] == pytest.approx(expected, abs=60)


def test_a_server_whose_disk_the_provider_does_not_show_is_not_ended_unsaved(lab: World) -> None:
    server = up(lab)
    cloud_of(lab).has_disks = False
    lab.machine.error = unreachable()
    with pytest.raises(PolicyError, match="not everything on it could be saved"):
        down(lab.context(), discard=False)
    assert server.id in cloud_of(lab).machines


@pytest.mark.parametrize("command", ["down", "orphans"])
def test_a_disk_that_a_lagging_list_calls_a_part_of_an_ended_server_stays(
    lab: World, command: str
) -> None:
    server = up(lab)
    cloud_of(lab).terminate(server.id)
    disk = Resource(provider="cloud", kind="volume", id="vol-1", lab_id=LAB_ID, server_id=server.id)
    key = Resource(provider="cloud", kind="key-pair", id="key-1", lab_id=LAB_ID)
    cloud_of(lab).left = [disk, key]
    if command == "down":
        down(lab.context(), discard=False)
    else:
        end_orphans(lab.context(), find_orphans(lab.context()), kept_too=False)
    assert cloud_of(lab).left == [disk]


def test_a_drill_says_that_a_held_disk_stays(lab: World) -> None:
    server, reporter = up(lab), Recorded()
    lab.machine.run_with("night", model="weights")
    context = lab.context(reporter)
    night = Run(id="night", lab_id=LAB_ID, server_id=server.id, state="running")
    reclaim_drill._require_consent(
        context, server, night, reclaim_drill._RunMonitor(context, server, "night"), 30.0
    )
    [asked] = reporter.asked
    assert asked.question.endswith("its disk is kept?")
    assert "LOST" not in asked.detail


def test_a_drill_waits_for_no_step_of_a_run_that_writes_none(lab: World) -> None:
    server, reporter = up(lab), Recorded()
    context = lab.context(reporter)
    monitor = reclaim_drill._RunMonitor(context, server, "night")
    assert reclaim_drill._await_first_step(context, server, monitor) == (None, None)
    assert reporter.said.startswith("night writes no steps to logs/progress.json")


def test_a_dead_server_whose_disk_the_provider_does_not_show_goes_on(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = up(lab)
    cloud_of(lab).has_disks = False
    reporter = Recorded()
    monkeypatch.setattr(server_loss, "is_reachable", lambda *_: False)
    silences = server_loss.FailedChecks()
    monkeypatch.setattr(silences, "note_failure", lambda *_: True)
    server_loss.require_alive(lab.context(reporter), server, silences)
    assert server.id in cloud_of(lab).machines
    assert "its disk cannot be kept" in reporter.said


def test_a_disk_that_may_be_half_released_is_kept_anew(lab: World) -> None:
    server = up(lab)
    cloud_of(lab).release_errors = [LinkLostError("the answer never came")]
    guard.arm(with_store(lab), server)
    up(lab)
    assert cloud_of(lab).calls.count("keep_disk") == 2


def test_a_release_is_asked_for_until_the_provider_has_time(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "THROTTLED_PAUSE_S", 0.01)
    up(lab)
    cloud_of(lab).release_errors = [ThrottledError("later"), ThrottledError("later")]
    down(lab.context(), discard=False)
    assert cloud_of(lab).kept_until == {}


@pytest.mark.parametrize(("files", "is_kept"), [(("model",), False), (TWO_OF_ONE_NAME, True)])
def test_the_disk_of_a_server_that_is_taken_back_stays_where_not_all_is_here(
    lab: World, files: tuple[str, ...], is_kept: bool
) -> None:
    server = up(lab)
    run = lab.machine.run_with("night")
    for name in files:
        run.joinpath("checkpoints", name).write_text("weights")
    cloud_of(lab).takes_back = True
    server_loss.save_and_terminate(lab.context(), "night")
    assert cloud_of(lab).machines == {}
    assert (server.id in cloud_of(lab).kept_until) == is_kept


def test_what_was_edited_on_a_server_that_is_taken_back_is_here(lab: World) -> None:
    code = lab.home / "lab" / "train.py"
    code.write_text("print(1)")
    up(lab)
    lab_files.push(lab.context(), lab.context().get_server(), force=False)
    (lab.machine.home / "labctl" / "digits" / "code" / "train.py").write_text("print(2)")
    cloud_of(lab).takes_back = True
    lab.machine.run_with("night", model="weights")
    server_loss.save_and_terminate(lab.context(), "night")
    [saved] = (lab.home / "lab" / "server-edits").glob("*/train.py")
    assert saved.read_text() == "print(2)"


def test_a_disk_that_cannot_be_kept_is_a_warning(lab: World, armed: list[GuardRequest]) -> None:
    cloud_of(lab).is_denied = True
    reporter = Recorded()
    up(lab, reporter=reporter)
    assert "will not be kept when the server ends: ec2:ModifyInstanceAttribute" in reporter.said
    assert armed[-1].ending.disk == "goes"


def test_a_server_of_another_machine_ends_with_its_disk(lab: World) -> None:
    server = up(lab)
    lab.places.database.unlink()
    context = lab.context()
    assert not list_kept_disks(context.state)
    down(context, discard=True)
    assert "release_disk" in cloud_of(lab).calls
    assert server.id not in cloud_of(lab).kept_until

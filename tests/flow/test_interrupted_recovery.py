"""A recovery that was ended while its new server started, and what goes on after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from lab_world import LAB_ID, Cloud, World, world

from labctl.errors import ConnectError, HostKeyError, ThrottledError
from labctl.lifecycle import follow, recover, server_loss
from labctl.lifecycle.recovery_lock import RecoveryLockedError
from labctl.model import Run, Server
from labctl.runs import runs
from labctl.servers.context import LabContext
from labctl.wire.runs import FollowRunOpening, RunRecord

STARTING = {"host": "", "port": 22, "host_key": ""}


@pytest.fixture
def lab(tmp_path: Path) -> World:
    return world(tmp_path, Cloud)


def put_starting_on_record(lab: World) -> tuple[LabContext, Server]:
    """A server as `create` returned it, and a run that a server before it had."""
    context = lab.context()
    server = lab.cloud.add("srv-new", "digits", LAB_ID)
    endpoint = msgspec.structs.replace(server.endpoint, **STARTING)
    context.state.save_server(msgspec.structs.replace(server, endpoint=endpoint))
    run = Run(id="night", lab_id=LAB_ID, server_id="srv-old", state="running")
    context.state.save_run(run)
    return context, server


def test_the_recovery_goes_on_with_the_server_that_has_no_address_on_record(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, server = put_starting_on_record(lab)
    asked: list[str] = []

    def fetch(_: LabContext, asked_server: Server, run_id: str) -> None:
        asked.append(asked_server.endpoint.host)

    resumed: list[str] = []

    class Resumed:
        run = Run(id="night", lab_id=LAB_ID, server_id=server.id, state="running")

    def resume(_: LabContext, run_id: str, *, reason: str, wait: bool) -> Resumed:
        resumed.append(reason)
        return Resumed()

    monkeypatch.setattr("labctl.runs.runs.fetch_run", fetch)
    monkeypatch.setattr(recover, "recover", resume)
    assert recover.check_and_recover(context, "night").server_id == server.id
    assert asked == [server.endpoint.host]
    assert asked[0]
    assert resumed == [f"the server {server.id} does not have this run"]


def test_a_provider_that_is_busy_does_not_end_the_follower(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, server = put_starting_on_record(lab)
    replies: list[Exception] = [ThrottledError("too many calls")]
    find = lab.cloud.find

    def find_later(server_id: str) -> Server | None:
        if replies:
            raise replies.pop()
        return find(server_id)

    watched: list[str] = []

    def watch(_: LabContext, watched_server: Server, run_id: str, **__: object) -> Run:
        watched.append(watched_server.endpoint.host)
        return Run(id=run_id, lab_id=LAB_ID, server_id=server.id, state="exited", exit_code=0)

    monkeypatch.setattr(lab.cloud, "find", find_later)
    monkeypatch.setattr("labctl.runs.runs.watch", watch)
    monkeypatch.setattr(follow, "FIRST_PAUSE_S", 0.01)
    run = follow.follow(context, "night", on_log=lambda block: None)
    assert (run.state, watched, replies) == ("exited", [server.endpoint.host], [])


@pytest.mark.parametrize("is_same_machine", [True, False])
def test_a_check_records_the_address_that_a_server_has_now(
    lab: World, monkeypatch: pytest.MonkeyPatch, is_same_machine: bool
) -> None:
    context = lab.context()
    shown = lab.cloud.add("srv-new", "digits", LAB_ID)
    key = shown.endpoint.host_key if is_same_machine else "ssh-ed25519 AAAA"
    before = msgspec.structs.replace(shown.endpoint, host="192.0.2.7", host_key=key)
    context.state.save_server(msgspec.structs.replace(shown, endpoint=before))
    server = context.get_server()
    monkeypatch.setattr(server_loss, "is_reachable", lambda endpoint, within_s: True)
    server_loss.require_alive(context, server, server_loss.FailedChecks())
    recorded = context.get_server().endpoint.host
    assert recorded == (shown.endpoint.host if is_same_machine else "192.0.2.7")


class CutLink:
    """The agent behind a link that breaks twice before it passes on that the run has ended."""

    cuts = 2

    def stream(self, verb: object, request: object, **_: object) -> FollowRunOpening:
        if self.cuts:
            self.cuts -= 1
            raise ConnectError("the link was cut")
        return FollowRunOpening(RunRecord(id="night", lab_id=LAB_ID, state="exited"), 0)


@pytest.mark.parametrize("is_recovering", [True, False])
def test_the_provider_is_asked_once_for_each_cut(
    lab: World, monkeypatch: pytest.MonkeyPatch, is_recovering: bool
) -> None:
    context = lab.context()
    shown = lab.cloud.add("srv-new", "digits", LAB_ID)
    before = msgspec.structs.replace(shown.endpoint, host="192.0.2.7")
    context.state.save_server(msgspec.structs.replace(shown, endpoint=before))
    requests: list[str] = []
    find = lab.cloud.find

    def count(server_id: str) -> Server | None:
        requests.append(server_id)
        return find(server_id)

    link = CutLink()
    monkeypatch.setattr(lab.cloud, "find", count)
    monkeypatch.setattr(LabContext, "open_agent", lambda *_: link)
    monkeypatch.setattr(server_loss, "is_reachable", lambda endpoint, within_s: True)
    monkeypatch.setattr("labctl.runs.runs.time.sleep", lambda _: None)
    if is_recovering:
        run = follow.follow(context, "night", on_log=lambda block: None)
    else:
        run = runs.watch(context, context.get_server(), "night", on_log=lambda block: None)
    assert run.state == "exited"
    assert requests == ["srv-new", "srv-new"]
    assert context.get_server().endpoint.host == shown.endpoint.host


class OtherMachine:
    """Another machine at the server's address: its host key is not the pinned one."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile = meanwhile
        self.answers = False

    def stream(self, verb: object, request: object, **_: object) -> FollowRunOpening:
        if self.answers:
            return FollowRunOpening(RunRecord(id="night", lab_id=LAB_ID, state="exited"), 0)
        self.answers = True
        self.meanwhile()
        raise HostKeyError("the host key is another one")

    call = stream


def watch_other_machine(
    lab: World, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Server], None]
) -> tuple[LabContext, Server]:
    context = lab.context()
    server = lab.cloud.add("srv-night", "digits", LAB_ID)
    context.state.save_server(server)
    context.state.save_run(Run(id="night", lab_id=LAB_ID, server_id=server.id, state="running"))
    other = OtherMachine(lambda: meanwhile(server))
    monkeypatch.setattr(LabContext, "open_agent", lambda self, server: other)
    monkeypatch.setattr(server_loss, "is_reachable", lambda endpoint, within_s: True)
    monkeypatch.setattr("labctl.runs.runs.time.sleep", lambda pause_s: None)
    return context, server


def follow_night(context: LabContext, server: Server) -> Run:
    on_cut = partial(server_loss.require_alive, silences=server_loss.FailedChecks())
    return runs.watch(context, server, "night", on_log=lambda block: None, on_cut=on_cut)


def test_an_address_that_a_cloud_gave_to_another_machine_means_a_lost_server(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, server = watch_other_machine(
        lab, monkeypatch, lambda server: lab.cloud.terminate(server.id)
    )
    with pytest.raises(server_loss.ServerGoneError):
        follow_night(context, server)


def test_a_keeper_recovers_a_run_whose_address_another_machine_has(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, server = watch_other_machine(
        lab, monkeypatch, lambda server: lab.cloud.terminate(server.id)
    )
    reasons: list[str] = []

    def resume(_: LabContext, run_id: str, *, reason: str, wait: bool) -> None:
        reasons.append(reason)
        raise RecoveryLockedError("another watcher")

    monkeypatch.setattr(recover, "recover", resume)
    recover.check_and_recover(context, "night")
    assert reasons == [f"the server {server.id} is gone"]


def test_a_server_at_a_new_address_is_followed_there(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move(server: Server) -> None:
        endpoint = msgspec.structs.replace(server.endpoint, host="192.0.2.8")
        lab.cloud.change(server.id, endpoint=endpoint)

    context, server = watch_other_machine(lab, monkeypatch, move)
    assert follow_night(context, server).state == "exited"
    assert context.get_server().endpoint.host == "192.0.2.8"


def test_a_wrong_host_key_of_a_live_server_stays_an_error(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, server = watch_other_machine(lab, monkeypatch, lambda server: None)
    with pytest.raises(HostKeyError):
        follow_night(context, server)

"""Accounts on shared servers: what several of them, or several processes, have in common."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest
from course_context import a_class, roster

from labctl.courses import server_contents, servers, shared_servers
from labctl.courses.account_changes import AccountChanges
from labctl.courses.seat_accounts import SharedServerAccount
from labctl.courses.shared_seats import SharedSeats
from labctl.courses.shared_servers import CLUSTER_LOCK, SharedServers
from labctl.errors import AuthenticationError, LabError, LockHeldError, PolicyError
from labctl.model import CreateServerRequest, Need, Offer, Server
from labctl.providers import Provider
from labctl.state.locks import hold_lock

NAMES = ("alice", "bob", "carol")
SLURM = "{engine: slurm, gpus: 1, gpu_minutes: 60}"


def make_seats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str) -> SharedSeats:
    """Three accounts on one server of a cloud."""
    made = a_class(tmp_path, monkeypatch, roster(NAMES), f"shared: {shared}\n")
    file = made.folder.path / "course.yaml"
    file.write_text(file.read_text().replace("image: {build: .}\n", ""))
    course = servers.build_course_context(
        made.folder, made.places, made.state, made.reporter, plain=True
    )
    hosts = SharedServers(made.folder, course)
    for name in NAMES:
        request = CreateServerRequest(
            lab=f"ml-{name}",
            lab_id=made.seat(name).lab_id,
            token=f"token-{name}",
            public_key="ssh-ed25519 AAAA course",
            identity="/keys/id",
            need=Need(),
        )
        sitting = hosts.seating.reserve(request, name, 8)
        hosts.seating.set_state([sitting.token], "there")
    made.state.save_server(made.cloud.add("srv-host", "ml-shared-1", hosts.lab_id(1)))
    return SharedSeats(hosts)


def test_the_offer_of_a_server_is_built_once_for_all_its_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = make_seats(tmp_path, monkeypatch, "{accounts_per_server: 8, gpus: 1, gpu_lease: 4h}")
    describe, described = SharedServers.describe_offer, list[str]()

    def count(hosts: SharedServers, server: Server) -> Offer:
        described.append(server.id)
        return describe(hosts, server)

    monkeypatch.setattr(SharedServers, "describe_offer", count)
    listed = seats.servers()
    assert [server.endpoint.user for server in listed] == [f"lab-{name}" for name in NAMES]
    assert len({server.offer for server in listed}) == 1
    assert described == ["srv-host"]


def test_two_processes_do_not_change_the_queue_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = make_seats(tmp_path, monkeypatch, SLURM)
    monkeypatch.setattr(shared_servers, "CLUSTER_LOCK_S", 0.1)
    lock = seats.hosts.folder.private / CLUSTER_LOCK
    with hold_lock(lock, "changing accounts", wait_s=1.0, is_command=False):
        for change in (seats.upkeep.update_limits, seats.upkeep.reserve_hours):
            with pytest.raises(LockHeldError):
                change()


def test_an_account_that_has_not_ended_everywhere_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = make_seats(tmp_path, monkeypatch, SLURM)
    monkeypatch.setattr(SharedServers, "_update_accounts", lambda *_: AccountChanges(("gpu2",)))
    alice = seats.servers()[0]
    with pytest.raises(LabError, match="has not ended on every machine"):
        seats.terminate(alice.id)
    states = {each.account: each.state for each in seats.hosts.seating.list_all()}
    assert states == {"lab-alice": "leaving", "lab-bob": "there", "lab-carol": "there"}
    monkeypatch.setattr(SharedServers, "_update_accounts", lambda *_: AccountChanges())
    seats.terminate(alice.id)
    assert seats.find(alice.id) is None


def test_an_account_that_is_refused_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = make_seats(tmp_path, monkeypatch, SLURM)
    seating = seats.hosts.seating
    seating.set_state(["token-alice", "token-bob"], "wanted")
    seating.set_state(["token-carol"], "leaving")
    refusal = PolicyError("lab-alice cannot have the same uid on gpu1 and gpu2")
    tried: list[list[str]] = []

    def change(
        _hosts: object, _number: int, *accounts: list[SharedServerAccount]
    ) -> AccountChanges:
        tried.append([account.account for account in (*accounts[0], *accounts[1])])
        return AccountChanges(errors={"lab-alice": refusal})

    monkeypatch.setattr(SharedServers, "ensure_server", lambda *_: None)
    monkeypatch.setattr(SharedServers, "_update_accounts", change)
    requests = {
        name: CreateServerRequest(
            lab=f"ml-{name}",
            lab_id=next(each.lab_id for each in seating.list_all() if each.lab == f"ml-{name}"),
            token=f"token-{name}",
            public_key="ssh-ed25519 AAAA course",
            identity="/keys/id",
            need=Need(),
        )
        for name in ("alice", "bob")
    }
    offer = seats.servers()[0].offer
    assert seats.create(offer, requests["bob"]).endpoint.user == "lab-bob"
    with pytest.raises(PolicyError, match="cannot have the same uid"):
        seats.create(offer, requests["alice"])
    states = {each.account: each.state for each in seating.list_all()}
    assert states == {"lab-bob": "there", "lab-carol": "gone"}, "a later request starts anew"
    assert tried == [["lab-alice", "lab-bob", "lab-carol"], ["lab-alice"]]


def test_a_machine_is_prepared_before_accounts_are_all_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = make_seats(tmp_path, monkeypatch, "{accounts_per_server: 8, gpus: 1, gpu_lease: 4h}")
    hosts = seats.hosts
    only_accounts: list[bool] = []
    monkeypatch.setattr(
        shared_servers, "share", lambda *_, **more: only_accounts.append(more["only_accounts"])
    )
    first = hosts.list_servers_by_number()[1]
    new = msgspec.structs.replace(first, id="srv-new")
    for server in (first, first, new, new):
        hosts.share_accounts(hosts.build_context(1), server, [], None)
    hosts.share_accounts(hosts.build_context(1), first, [], None, sets_up=True)
    assert only_accounts == [False, True, False, True, False]


def test_results_of_an_account_without_a_key_were_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = make_seats(tmp_path, monkeypatch, SLURM)
    course = seats.hosts.course.replace_provider(cast("Provider", seats))
    alice = seats.servers()[0]

    def refuse(*_: object) -> None:
        raise AuthenticationError("lab-alice does not accept the key")

    monkeypatch.setattr(server_contents, "list_labs", refuse)
    monkeypatch.setattr(server_contents.adoption, "is_fresh", lambda *_: False)
    with pytest.raises(LabError, match="could be saved"):
        server_contents.save_server(course, alice, discard=False)
    seats.hosts.seating.set_state(["token-alice"], "leaving")
    assert server_contents.save_server(course, alice, discard=False).files == 0

"""In which order `course up` repairs a cluster, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from test_shared_seats import SLURM, make_seats

from labctl.commands import cluster_accounts, slurm_nodes
from labctl.courses import queue_upkeep
from labctl.courses.class_cluster import ClassCluster
from labctl.courses.class_queue import ClassQueue
from labctl.courses.cluster_session import ClusterSession
from labctl.courses.shared_seats import SharedSeats
from labctl.courses.shared_servers import SharedServers
from labctl.errors import BusyError
from labctl.model import Server
from labctl.servers.shared_server import SharedAccount

FIRST_UID = 20_000
JOINED = "gpu1|idle|root|none\ngpu2|idle|root|none\ngpu3|idle|root|none\n"
RETURNED = JOINED.replace("gpu2|idle|root|none", "gpu2|drain|root|removed from course.yaml")
RESUME = "gpu1: scontrol update nodename=gpu2 state=resume"


class RehearsedCluster:
    """Machines that print their accounts. `actions` is what changed on them, in order.

    `accounts` are those in each machine's group, and `uids` those that a machine has otherwise.
    """

    def __init__(self) -> None:
        self.states = JOINED
        self.accounts = {
            name: ["lab-alice", "lab-bob", "lab-carol"] for name in ("gpu1", "gpu2", "gpu3")
        }
        self.uids: dict[tuple[str, str], int] = {}
        self.actions: list[str] = []
        self.broken: set[str] = set()

    def run(self, machine: str, script: str) -> str:
        if script == cluster_accounts.build_inspection():
            names = self.accounts[machine]
            rows = [
                f"{name}:x:{uid}:{uid}::/srv/class/{name}:/bin/bash"
                for number, name in enumerate(names)
                for uid in [self.uids.get((machine, name), FIRST_UID + number)]
            ]
            groups = f"labctl:x:998:{','.join(names)}"
            return "\n".join(["--- host", machine, "--- groups", groups, "--- accounts", *rows, ""])
        if script == slurm_nodes.build_query():
            return f"gpu1\ngpu2\ngpu3\n--- states\n{self.states}"
        if not script.startswith(("getent", "find")):
            self.actions.append(f"{machine}: {script}")
        return ""

    def connect(self) -> ClusterSession:
        session = ClusterSession("gpu1")
        for name in self.accounts:
            session.add(name, lambda name=name: lambda script: self.run(name, script))  # type: ignore[misc]
        return session

    def share(
        self,
        _context: object,
        _server: object,
        accounts: list[SharedAccount],
        session: ClusterSession,
        **_: Any,
    ) -> None:
        for name in self.broken:
            session.set_aside(name, BusyError(f"the disk of {name} is full"))
        for account in accounts:
            self.actions.append(f"{'create' if account.keys else 'end'} {account.name}")

    def install(self, hosts: SharedServers, patch: pytest.MonkeyPatch) -> None:
        """Give the course this cluster, without servers on the other machines."""
        hosts.__dict__["cluster"] = cast(
            "ClassCluster",
            SimpleNamespace(
                controller="gpu1",
                homes="/srv/class",
                connect=self.connect,
                narrow=lambda context, _: context,
                list_other_servers=lambda _: [],
                extend_others=lambda *_: None,
                bring_up_others=lambda *_: [],
                forget_other_servers=lambda: None,
                end_others=lambda _: self.actions.append("end the other machines"),
            ),
        )
        hosts.__dict__["sharing"] = msgspec.structs.replace(hosts.sharing, homes="/srv/class")
        patch.setattr(SharedServers, "share_accounts", self.share)
        patch.setattr(SharedServers, "ensure_server", lambda *_: server(hosts))
        patch.setattr(queue_upkeep.guard, "read_watchdog", lambda *_: None)
        for name in ("update_or_repair", "update", "report_unavailable", "close", "release_hours"):
            patch.setattr(ClassQueue, name, lambda *_: None)


def server(hosts: SharedServers) -> Server:
    return hosts.list_servers_by_number()[1]


@pytest.fixture
def seats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedSeats:
    return make_seats(tmp_path, monkeypatch, SLURM)


@pytest.fixture
def cluster(seats: SharedSeats, monkeypatch: pytest.MonkeyPatch) -> RehearsedCluster:
    """The machines of these seats; all have joined."""
    cluster = RehearsedCluster()
    cluster.install(seats.hosts, monkeypatch)
    return cluster


def test_a_machine_that_is_back_takes_jobs_after_it_has_the_new_accounts(
    seats: SharedSeats, cluster: RehearsedCluster
) -> None:
    """While gpu2 was not in hosts, lab-carol was created on the others."""
    cluster.states = RETURNED
    cluster.accounts["gpu2"].remove("lab-carol")
    seats.upkeep.update_limits()
    assert cluster.actions == ["create lab-alice", "create lab-bob", "create lab-carol", RESUME]


def test_a_machine_that_is_back_and_cannot_be_used_takes_no_jobs(
    seats: SharedSeats, cluster: RehearsedCluster
) -> None:
    cluster.states = RETURNED
    cluster.broken = {"gpu2"}
    seats.upkeep.update_limits()
    assert RESUME not in cluster.actions


def test_a_machine_that_is_back_with_other_uids_takes_no_jobs(
    seats: SharedSeats, cluster: RehearsedCluster
) -> None:
    cluster.states = RETURNED
    cluster.uids["gpu2", "lab-bob"] = 3000
    seats.upkeep.update_limits()
    assert RESUME not in cluster.actions


def test_a_removed_student_is_locked_out_although_the_uids_differ(
    seats: SharedSeats, cluster: RehearsedCluster
) -> None:
    cluster.uids["gpu2", "lab-alice"] = 3000
    cluster.accounts["gpu3"].remove("lab-alice")
    alice = seats.servers()[0]
    seats.terminate(alice.id)
    assert seats.find(alice.id) is None
    lock = cluster_accounts.build_lock(["lab-alice"])
    assert cluster.actions == [f"gpu1: {lock}", f"gpu2: {lock}"]
    assert "usermod --groups labctl-ended" in lock


def test_the_server_ends_although_the_uids_of_its_last_account_differ(
    seats: SharedSeats, cluster: RehearsedCluster
) -> None:
    cluster.uids["gpu2", "lab-alice"] = 3000
    seats.hosts.seating.set_state(["token-bob", "token-carol"], "gone")
    seats.terminate(seats.servers()[0].id)
    assert cluster.actions[-1] == "end the other machines"
    assert seats.hosts.list_servers_by_number(now=True) == {}
    assert {each.state for each in seats.hosts.seating.list_all()} == {"gone"}


def test_an_account_that_ended_while_a_machine_was_silent_is_locked_there(
    seats: SharedSeats, cluster: RehearsedCluster
) -> None:
    cluster.uids["gpu2", "lab-alice"] = 3000
    seats.hosts.seating.set_state(["token-alice"], "leaving")
    seats.upkeep.update_limits()
    lock = cluster_accounts.build_lock(["lab-alice"])
    assert f"gpu2: {lock}" in cluster.actions
    assert cluster.actions[-2:] == ["create lab-bob", "create lab-carol"]

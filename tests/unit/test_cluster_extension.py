"""The machines of a cluster get as much time as its controller, except one that does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from labctl.commands.cluster_accounts import MachineAccounts
from labctl.courses import class_cluster
from labctl.courses.class_cluster import ClassCluster
from labctl.courses.cluster_session import ClusterSession
from labctl.errors import BusyError, ConnectError
from labctl.events import Event, Note
from labctl.wire.watchdog import WatchRecord

HOUR_S = 3600


def test_a_node_that_does_not_answer_does_not_keep_others_from_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_s: dict[str, float] = {"gpu3": HOUR_S, "gpu4": 5 * HOUR_S}

    def read(_: Any, server: Any) -> WatchRecord:
        if server.offer.type not in left_s:
            raise ConnectError("gpu2 does not answer")
        return WatchRecord(ttl_left_s=left_s[server.offer.type])

    def extend(context: Any, server: Any, span_s: int) -> WatchRecord:
        left_s[server.offer.type] += span_s
        return read(context, server)

    monkeypatch.setattr(class_cluster.guard, "read_watchdog", read)
    monkeypatch.setattr(class_cluster.guard, "extend", extend)
    monkeypatch.setattr(class_cluster.deadlines, "move_timer", lambda *_: None)
    names = ("gpu1", "gpu2", "gpu3", "gpu4")
    cluster = ClassCluster(None, None, names)  # type: ignore[arg-type]
    nodes = [(None, SimpleNamespace(offer=SimpleNamespace(type=name))) for name in names[1:]]
    monkeypatch.setattr(cluster, "list_others", lambda _: nodes)
    events: list[Event] = []
    shared: Any = SimpleNamespace(reporter=SimpleNamespace(emit=events.append))
    for _ in range(2):  # the second time, nothing is missing
        cluster.extend_others(shared, WatchRecord(ttl_left_s=3 * HOUR_S), cluster.other_machines)
        assert left_s["gpu3"] == pytest.approx(3 * HOUR_S, abs=5)
        assert left_s["gpu4"] == 5 * HOUR_S
    texts = [event.text for event in events if isinstance(event, Note)]
    assert len(texts) == 2
    assert texts[0].startswith("gpu2 still ends at its earlier time (gpu2 does not answer)")


def test_a_node_that_answers_and_cannot_be_used_is_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example, its disk is full: the others get their accounts."""

    def bring_up(node: Any) -> str:
        if node.name == "gpu2":
            raise BusyError("the disk of gpu2 is full")
        return f"server {node.name}"

    cluster = ClassCluster(None, None, ("gpu1", "gpu2", "gpu3"))  # type: ignore[arg-type]
    monkeypatch.setattr(class_cluster.up, "up", bring_up)
    monkeypatch.setattr(
        cluster, "build_context", lambda _, name: SimpleNamespace(name=name, subject=None)
    )
    session = ClusterSession("gpu1")
    machine = MachineAccounts(hostname="", uids={}, homes={}, enabled=frozenset())
    session.roots = dict.fromkeys(cluster.names, lambda script: "")
    session.machines = dict.fromkeys(cluster.names, machine)
    servers: list[Any] = list(cluster.bring_up_others(None, session))  # type: ignore[arg-type]
    assert servers == ["server gpu3"]
    assert session.other_machines == ("gpu3",)
    assert session.failures["gpu2"].what == "the disk of gpu2 is full"

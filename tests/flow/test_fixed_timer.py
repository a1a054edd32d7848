"""A timer at the provider that is set once, when a server is created."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from lab_world import DiskCloud, Recorded, World, world

from labctl.lifecycle import up as provision
from labctl.model import Server
from labctl.servers import deadlines
from labctl.wire.watchdog import WatchRecord

HOUR_S = 3600.0


class TimedCloud(DiskCloud):
    """One that ends every server a day after its creation, at half a dollar an hour."""

    fixed_timer = True
    ends_billing = frozenset({"timer"})

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.price = 0.5

    def add(self, *words: Any, **more: Any) -> Server:
        server = super().add(*words, **more)
        self.change(server.id, deadline_at=server.created_at + 24 * HOUR_S)
        return self.machines[server.id]


@pytest.fixture
def lab(tmp_path: Path) -> World:
    return world(tmp_path, TimedCloud)


def test_it_is_a_guard_like_others(lab: World) -> None:
    reporter = Recorded()
    server = provision.up(lab.context(reporter))
    [asked] = reporter.asked
    assert "guards: watchdog, timer at cloud" in asked.detail
    assert deadlines.can_end_billing(lab.cloud)
    assert deadlines.explain_missing_timer(lab.cloud) == ""
    watch = WatchRecord(alive=True, ttl_left_s=5 * HOUR_S)
    told = deadlines.describe(lab.context(), server, watch)
    assert told == "digits ends in 5 h at the latest; armed: watchdog, timer at cloud"


@pytest.mark.parametrize(("left_s", "warns"), [(5 * HOUR_S, False), (30 * HOUR_S, True)])
def test_a_deadline_beyond_it_is_told(lab: World, left_s: float, warns: bool) -> None:
    reporter, server = Recorded(), provision.up(lab.context())
    deadlines.move_timer(lab.context(reporter), server, WatchRecord(ttl_left_s=left_s))
    text = "the timer at cloud ends digits in 24 h without saving results"
    assert (text in reporter.said) is warns
    assert ("labctl stop" in reporter.said) is warns
    assert server.deadline_at == pytest.approx(time.time() + 24 * HOUR_S, abs=30)

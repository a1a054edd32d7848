"""A provider whose timer alone ends the costs: a machine that powers itself off bills on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

import pytest
from lab_world import DiskCloud, Recorded, World, world

from labctl.errors import DeniedError, PolicyError
from labctl.lifecycle import power_off, server_loss
from labctl.lifecycle import up as provision
from labctl.model import Server
from labctl.servers import deadlines
from labctl.servers.deadlines import DEFAULT_TTL_S, MARGIN_S
from labctl.wire.watchdog import WatchRecord


class TimerCloud(DiskCloud):
    """One like Azure: its timer stops a server for good, and its power-off does not."""

    ends_billing: ClassVar[frozenset[str]] = frozenset({"timer"})

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.price = 0.5
        self.has_disks = False
        self.missing_deadline_setup = ""
        self.timers: dict[str, float] = {}
        self.denies = False

    def set_deadline(self, server_id: str, at: float) -> None:
        if self.denies or self.missing_deadline_setup:
            raise DeniedError("the account may not set timers")
        self.timers[server_id] = at


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(server_loss, "DEAD_S", 0.0)
    return world(tmp_path, TimerCloud)


def cloud_of(lab: World) -> TimerCloud:
    assert isinstance(lab.cloud, TimerCloud)
    return lab.cloud


def up(lab: World, reporter: Recorded | None = None) -> Server:
    return provision.up(lab.context(reporter or Recorded()))


def keep(lab: World, reporter: Recorded) -> tuple[bool, int]:
    """Check the server as a keeper does; return whether it was ended, and after how many pauses."""
    pauses: list[float] = []
    lines = ["lab: digits", "run: [python, train.py]", "store: ssh://ann@store/labs"]
    (lab.home / "lab" / "lab.yaml").write_text("\n".join(lines) + "\n")
    return power_off.end_powered_off(lab.context(reporter), pauses.append), len(pauses)


def test_up_asks_for_the_price_alone_and_sets_the_timer(lab: World) -> None:
    reporter = Recorded()
    server = up(lab, reporter)
    [question] = reporter.asked
    assert (question.about, question.typed) == ("price", "")
    assert "it costs at most $6.00" in question.detail
    assert "guards: watchdog, timer at cloud" in question.detail
    due = server.created_at + DEFAULT_TTL_S + MARGIN_S
    assert cloud_of(lab).timers[server.id] == pytest.approx(due, abs=5)


def test_without_the_timers_setup_the_cost_of_a_month_has_to_be_typed(lab: World) -> None:
    cloud_of(lab).missing_deadline_setup = "the namespace is not registered"
    reporter = Recorded(answers=[True, False])
    with pytest.raises(PolicyError, match="nothing was started"):
        up(lab, reporter)
    price, billing = reporter.asked
    assert "no timer at cloud: the namespace is not registered" in price.detail
    assert (billing.about, billing.typed) == ("billing", "360.00")
    assert "no guard at cloud stops these costs" in billing.detail
    assert cloud_of(lab).tried == []


def test_a_timer_that_was_refused_is_not_called_an_end(lab: World) -> None:
    cloud_of(lab).denies = True
    reporter = Recorded()
    server = up(lab, reporter)
    assert "nothing at cloud ends the server if it hangs" in reporter.said
    watch = WatchRecord(alive=True, ttl_left_s=5 * 3600.0)
    assert deadlines.describe(lab.context(), server, watch) == (
        "digits powers itself off in 5 h at the latest, but costs $0.50/h until labctl down; "
        "armed: watchdog"
    )


def test_a_keeper_ends_a_server_that_is_off_before_its_timer_does(lab: World) -> None:
    server, reporter = up(lab), Recorded()
    assert keep(lab, reporter) == (True, server_loss.DEAD_CHECKS - 1)
    assert server.id not in cloud_of(lab).machines
    assert cloud_of(lab).timers[server.id] > time.time()
    assert "cloud bills a machine that is off, so it was ended" in reporter.said


def test_a_keeper_leaves_a_server_that_its_timer_has_stopped(lab: World) -> None:
    """It costs only its disk, which may have the only copy of results."""
    server = up(lab)
    cloud_of(lab).stop(server.id)
    assert keep(lab, Recorded()) == (False, 0)
    assert cloud_of(lab).machines[server.id].state == "stopped"

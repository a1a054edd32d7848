"""The first boot's timer follows the watchdog's ttl, and never gets in its way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from labctl.agent.host.paths import read_boottime_s
from labctl.agent.watchdog.boot_timer import CLOSE_S, LATER_S, update_timer
from labctl.servers import deadlines
from labctl.wire.watchdog import ServerLimits

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the timer is root's")
BOOT = "0c0ffee0-1111"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """As the first boot leaves it, with a ttl of 100 s."""
    path = tmp_path / "ttl"
    path.write_text(f"{BOOT} {read_boottime_s() + 100:.0f} {time.time() + 100:.0f}\n")
    return path


def left_s(file: Path) -> tuple[str, float, float]:
    """(boot, what is left by uptime, what is left by the wall clock)."""
    boot, at, wall = file.read_text().split()
    return boot, int(at) - read_boottime_s(), int(wall) - time.time()


def test_it_ends_the_machine_a_little_after_the_watchdog_would(file: Path) -> None:
    update_timer(BOOT, ServerLimits(ttl_s=3600.0, extended_s=600.0), 200.0, waits=False, file=file)
    boot, left, wall = left_s(file)
    assert boot == BOOT
    assert left == pytest.approx(4000 + LATER_S, abs=2)
    assert wall == pytest.approx(4000 + LATER_S, abs=2)


def test_after_a_reboot_it_is_told_anew(file: Path) -> None:
    limits = ServerLimits(ttl_s=3600.0)
    update_timer(BOOT, limits, 200.0, waits=False, file=file)
    update_timer("another", limits, 500.0, waits=False, file=file)
    boot, left, _ = left_s(file)
    assert boot == "another"
    assert left == pytest.approx(3100 + LATER_S, abs=2)


def test_nothing_is_written_where_nothing_has_changed(file: Path) -> None:
    update_timer(BOOT, ServerLimits(ttl_s=3600.0), 200.0, waits=False, file=file)
    before = file.stat().st_ino
    update_timer(BOOT, ServerLimits(ttl_s=3600.0), 200.0 + CLOSE_S / 2, waits=False, file=file)
    assert file.stat().st_ino == before


def test_it_waits_for_an_end_that_takes_longer_than_planned(file: Path) -> None:
    update_timer(BOOT, ServerLimits(ttl_s=300.0), 1000.0, waits=True, file=file)
    assert left_s(file)[1] == pytest.approx(LATER_S, abs=2)


def test_without_a_ttl_it_does_not_end_the_machine(file: Path) -> None:
    update_timer(BOOT, ServerLimits(), 1000.0, waits=False, file=file)
    assert left_s(file)[1] > 365 * 86400


@pytest.mark.parametrize("text", ["", "nonsense", f"{BOOT} x y", f"{BOOT}"])
def test_a_spoilt_line_is_replaced(file: Path, text: str) -> None:
    file.write_text(text)
    update_timer(BOOT, ServerLimits(ttl_s=50.0), 0.0, waits=False, file=file)
    assert left_s(file)[1] == pytest.approx(50 + LATER_S, abs=2)


def test_where_no_first_boot_left_one_none_is_made(tmp_path: Path) -> None:
    update_timer(BOOT, ServerLimits(ttl_s=50.0), 0.0, waits=False, file=tmp_path / "ttl")
    assert list(tmp_path.iterdir()) == []


def test_a_budget_ends_it_as_a_ttl_does(file: Path) -> None:
    limits = ServerLimits(ttl_s=7200.0, budget_usd=1.0, price_usd_per_hour=2.0)
    update_timer(BOOT, limits, 200.0, waits=False, file=file)
    assert left_s(file)[1] == pytest.approx(1600 + LATER_S, abs=2)


def test_it_is_set_with_the_margin_that_a_new_server_gets() -> None:
    assert LATER_S == deadlines.MARGIN_S

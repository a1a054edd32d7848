"""Deadlines on machines that boot: labctl killed before its first login, and timers that agree."""

from __future__ import annotations

import re
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aws_bed import DOWN, UP, AwsLab, Bed

pytest_plugins = ["aws_fixtures"]
pytestmark = pytest.mark.engine

DEADLINES = "labctl.servers.deadlines"
HOUR_S = 3600
DAY_S = 24 * HOUR_S


def lab_without_limits(machines: Bed) -> AwsLab:
    lab = machines.lab()
    (lab.root / "lab.yaml").write_text("lab: digits\nserver: {provider: aws}\nrun: echo trained\n")
    return lab


def first_boot_left_s(machines: Bed, instance: str) -> float:
    code, line = machines.rehearsal.execute(instance, "cat /var/lib/labctl/ttl")
    assert code == 0, line
    return float(line.split()[2]) - time.time()


def schedule_left_s(machines: Bed) -> float:
    scheduler = machines.client("scheduler")
    [known] = scheduler.list_schedules()["Schedules"]
    expression = scheduler.get_schedule(Name=known["Name"])["ScheduleExpression"]
    found = re.fullmatch(r"at\((.+)\)", expression)
    assert found is not None
    return datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp() - time.time()


def test_killed_right_after_create_the_machine_ends_by_itself(
    machines: Bed, tmp_path: Path
) -> None:
    """Nothing was set at AWS yet, and nobody has logged in."""
    lab = lab_without_limits(machines)
    soon = {f"{DEADLINES}.DEFAULT_TTL_S": 8, f"{DEADLINES}.MARGIN_S": 2}
    command = lab.start(
        *UP, settings=soon, trace=tmp_path / "trace", last="INSERT INTO events created"
    )
    assert command.wait() == -signal.SIGKILL, command.said
    (instance,) = machines.living()
    assert machines.client("scheduler").list_schedules()["Schedules"] == []
    machines.rehearsal.wait(instance, "terminated")
    lab.labctl(*DOWN)


@pytest.mark.long
def test_all_timers_hold_the_default_and_move_together(machines: Bed) -> None:
    lab = lab_without_limits(machines)
    said = lab.labctl(*UP)
    assert "it stops automatically after 12 h" in said
    assert "--no-deadline removes it" in said
    armed = "armed: watchdog, first-boot timer, timer at aws"
    assert re.search(rf"digits ends in (12 h|11 h 5\d min) at the latest; {armed}", said)
    (instance,) = machines.living()
    for left_s in (first_boot_left_s(machines, instance), schedule_left_s(machines)):
        assert 11.5 * HOUR_S < left_s < 12 * HOUR_S + 150
    lab.labctl("extend", "3h")
    both = (first_boot_left_s(machines, instance), schedule_left_s(machines))
    for left_s in both:
        assert 14.5 * HOUR_S < left_s < 15 * HOUR_S + 150
    assert abs(both[0] - both[1]) < 60
    # A budget in place of the default: each of them is told.
    lab.labctl(*UP, "--budget", "1")
    price = lab.json("status")["server"]["offer"]["price_usd_per_hour"]
    for left_s in (first_boot_left_s(machines, instance), schedule_left_s(machines)):
        assert left_s == pytest.approx(HOUR_S / price + 120, abs=300)
    said = lab.labctl(*UP, "--no-deadline")
    assert f"digits has no deadline: ${24 * price:.2f} a day" in said
    for left_s in (first_boot_left_s(machines, instance), schedule_left_s(machines)):
        assert left_s > 365 * DAY_S
    lab.labctl(*DOWN)

"""The end of a server: the wind-down thread, then power-off or release of a shared machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

from ...wire.text import duration_text
from ..host.paths import read_boottime_s, read_json
from ..reply import Failure
from .decisions import SETTLE_S
from .shutdown import Say, ShutdownPlan, WindDownOutcome, should_end, wind_down

POWER_OFF_AGAIN_S = 30.0
LEASES = Path("/var/tmp/labctl-leases")


class WindDown:
    """A wind-down that runs in a thread, and the step after it.

    `limit_s` is the elapsed time of the limit that caused it, `began_s` the time when it began.
    """

    def __init__(
        self, plan: ShutdownPlan, by: str, began_s: float, limit_s: float, say: Say
    ) -> None:
        self.plan = plan
        self.by = by
        self.began_s = began_s
        self.limit_s = limit_s
        self.say = say
        self.outcome: WindDownOutcome | None = None
        self.released = False
        self.attempts = 0
        self.next_s = 0.0
        threading.Thread(target=self._run_wind_down, daemon=True).start()

    def _run_wind_down(self) -> None:
        try:
            left_s = self.limit_s - self.began_s - SETTLE_S
            self.outcome = wind_down(self.plan, self.by, self.say, left_s)
        except (Failure, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            self.say("wind-down failed", f"{type(error).__name__}: {error}")
            # Assume that results are unsaved.
            self.outcome = WindDownOutcome(should_end(self.by, True, self.plan.disk == "stays"))

    def report_overrun_s(self, elapsed_s: float) -> float:
        """Return by how many seconds the end is late, and record it as a decision."""
        if self.by == "idle":
            return 0.0
        over_s = elapsed_s - self.limit_s
        timing = f"{duration_text(abs(over_s))} {'after' if over_s > 0 else 'before'}"
        self.say(
            "wound down", f"{timing} the {self.by}, {duration_text(elapsed_s - self.began_s)} long"
        )
        return round(max(0.0, over_s), 1)

    def finish(self) -> None:
        """Release the machine, or power it off again every POWER_OFF_AGAIN_S until it is off."""
        if read_boottime_s() < self.next_s:
            return
        if self.plan.kind == "release":
            is_released = release_lease(self.plan.lease, self.plan.lab_id)
            why = "the lease was released" if is_released else "the lease belongs to another lab"
            self.say("released", why)
            self.released = True
            return
        self.say("powering off", f"attempt {self.attempts + 1}")
        os.sync()
        power_off(self.say, self.attempts)
        self.attempts += 1
        self.next_s = read_boottime_s() + POWER_OFF_AGAIN_S


def power_off(say: Say, attempt: int) -> None:
    """Power the machine off. Each further attempt uses more force."""
    ways = [
        ["systemctl", "poweroff"],
        ["shutdown", "-P", "now"],
        ["poweroff"],
        ["systemctl", "poweroff", "--force", "--force"],
        ["poweroff", "-f"],
    ]
    usable = [way for way in ways if shutil.which(way[0]) and _is_usable(way)]
    if not usable:
        say("not powered off", "the server has none of systemctl, shutdown, poweroff")
        return
    way = usable[min(attempt, len(usable) - 1)]
    words = way if os.geteuid() == 0 else ["sudo", "-n", *way]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        why = done.stderr.strip()[:300] if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    if why:
        say("not powered off", f"{' '.join(way)}: {why}")


def _is_usable(way: list[str]) -> bool:
    return way[0] != "systemctl" or Path("/run/systemd/system").is_dir()


def release_lease(server_id: str, lab_id: str, directory: Path = LEASES) -> bool:
    """Release a shared machine: this lab's lease, if it is still the current one.

    The server id there ends with its lease's token (see labctl/commands/lease.py for the files).
    """
    numbers = [int(p.name[6:]) for p in directory.glob("lease-[0-9]*") if p.name[6:].isdigit()]
    if not numbers:
        return False
    current = directory / f"lease-{max(numbers)}"
    owner = read_json(current / "owner.json")
    token = owner.get("token")
    if not token or owner.get("lab_id") != lab_id or not server_id.endswith(f"-{token}"):
        return False
    (current / "released").touch()
    return True

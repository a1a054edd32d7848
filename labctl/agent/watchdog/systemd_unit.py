"""The watchdog as a systemd unit.

Its text names no version of the program, so that an update only restarts this unit. A changed text
needs a reload of systemd, which waits until no container has a GPU (systemd_reload.py). Until then
the earlier watchdog keeps running, and accepts new limits.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..host.paths import read_text, write_text
from ..host.systemd_reload import enable_at_boot, list_gpu_containers, systemctl
from .notice_services import open_notice_service
from .state_files import Lock, read_limits, read_status, record_decision
from .wakeup import wake_watchdog

UNIT = Path("/etc/systemd/system/labctl-watchdog.service")
# Below the watchdog's directory: a link to the running version of the program.
CURRENT = "current"
# seconds that systemd allows beyond the wait for a reclaim
STOP_MARGIN_S = 3.0


def build_unit_text(directory: Path, shutdown_s: float = 0.0) -> str:
    """Build the unit's text. `shutdown_s` is how long a shutdown waits for a reclaim's results."""
    # The link is resolved at the start, so that an update does not affect a running watchdog.
    program = f'"$$(readlink -f {directory / CURRENT})"'
    words = f"{sys.executable} {program}"
    waits = f"""
# Runs while the watchdog, the engine and the network are still there.
ExecStop=/bin/sh -c 'exec {words} await-reclaim {directory}'
TimeoutStopSec={shutdown_s + STOP_MARGIN_S:.0f}"""
    return f"""[Unit]
Description=labctl's watchdog: ends this server at its deadline, its budget, or when idle
After=docker.service{" network-online.target" if shutdown_s else ""}
# Tried again for ever: systemd would give up after five quick crashes, and nothing would end this.
StartLimitIntervalSec=0

[Service]
ExecStart=/bin/sh -c 'exec {words} watchdog {directory}'{waits if shutdown_s else ""}
StandardInput=null
Restart=always
RestartSec=1
KillMode=process
OOMScoreAdjust=-1000

[Install]
WantedBy=multi-user.target
"""


def ensure_unit(directory: Path, program: Path) -> bool:
    """Have the unit run `program`; False if that must wait and an earlier version runs."""
    limits = read_limits(directory)
    service = open_notice_service(limits.notices if limits else "")
    text = build_unit_text(directory, service.shutdown_s)
    current_text = read_text(UNIT)
    is_changed = current_text != text.strip()
    gpu_containers = list_gpu_containers() if is_changed else []
    if current_text and gpu_containers:
        _postpone_update(directory, gpu_containers)
        return False
    if not is_changed and _running_version(directory) == program.name:
        wake_watchdog(directory)
        return True
    _link_current(directory, program)
    if is_changed:
        write_text(UNIT, text)
        # A unit that systemd has never read needs no reload.
        if not gpu_containers:
            systemctl("daemon-reload")
    enable_at_boot(UNIT.name)
    systemctl("restart", UNIT.name)
    return True


def _running_version(directory: Path) -> str:
    """Return the version of the running watchdog; "" if none runs."""
    if not Lock(directory).holder():
        return ""
    return read_status(directory, True, 0).version


def _postpone_update(directory: Path, gpu_containers: list[str]) -> None:
    why = "it needs a reload of systemd, which could take the GPU away from a container: "
    elapsed_s = read_status(directory, True, 0).elapsed_s
    record_decision(directory, elapsed_s, "update postponed", why + ", ".join(gpu_containers))
    if Lock(directory).holder():
        wake_watchdog(directory)
    else:
        systemctl("restart", UNIT.name)


def _link_current(directory: Path, program: Path) -> None:
    staging = directory / f".{CURRENT}-{os.getpid()}"
    staging.symlink_to(program.name)
    staging.replace(directory / CURRENT)

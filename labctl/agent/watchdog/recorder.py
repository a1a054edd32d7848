"""The watchdog's part in the telemetry of runs: that somebody records them while they live.

What is measured and written, and by whom, is in telemetry.py.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any, Callable

from ..host.paths import home
from ..host.telemetry import claimed
from ..program import PROGRAM
from ..reply import Failure
from .activity import Account
from .shutdown import running

LOOK_S = 5.0
# A recorder that failed is started again after so long.
AGAIN_S = 60.0


class Recorder:
    """Threads of the watchdog may hang with it; its clocks go on."""

    def __init__(self, account: Callable[[], Account], say: Callable[[str, str], None]) -> None:
        self._account = account
        self._say = say
        self._failed = ""
        threading.Thread(target=self._go, daemon=True).start()

    def _go(self) -> None:
        while True:
            time.sleep(LOOK_S if self._recorded() else AGAIN_S)

    def _recorded(self) -> bool:
        """Whether there was nothing to record, or all went well."""
        try:
            if not running("labctl.run") or not self._nobody():
                return True
            done: subprocess.CompletedProcess[Any] = subprocess.run(
                [*self._account().words, sys.executable, "-I", "-S", str(PROGRAM), "telemetry"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                check=False,
            )
        except (Failure, OSError, ValueError, subprocess.SubprocessError) as error:
            return self._told(str(error))
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return self._told("" if done.returncode == 0 else f"exit {done.returncode}: {said[-1:]}")

    def _nobody(self) -> bool:
        with claimed(self._account().uid, home()) as free:
            return free

    def _told(self, failed: str) -> bool:
        if failed and failed != self._failed:
            self._say("telemetry interrupted", failed)
        self._failed = failed
        return not failed

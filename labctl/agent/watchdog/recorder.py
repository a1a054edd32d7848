"""Supervision of the telemetry recorder: the watchdog starts it while runs live.

The recorder itself is telemetry.py.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any, Callable

from ...wire.runs import PROCESS
from ..host.paths import labctl_home
from ..host.telemetry import claim_recording
from ..program import PROGRAM
from ..reply import Failure
from ..runs.executors import get_executor
from .activity import LabAccount
from .shutdown import list_running_containers

POLL_S = 5.0
# seconds before a recorder that failed is started again
AGAIN_S = 60.0


class Recorder:
    """A thread that keeps a recorder running. If it hangs, the watchdog's clocks still run."""

    def __init__(self, account: Callable[[], LabAccount], say: Callable[[str, str], None]) -> None:
        self._account = account
        self._say = say
        self._failed = ""
        threading.Thread(target=self._run_forever, daemon=True).start()

    def _run_forever(self) -> None:
        while True:
            time.sleep(POLL_S if self._ensure_recorder() else AGAIN_S)

    def _ensure_recorder(self) -> bool:
        """Run the recorder if runs live and nobody records them; return False if it failed."""
        try:
            is_needed = list_running_containers("labctl.run") or get_executor(PROCESS).list_live()
            if not is_needed or not self._is_unclaimed():
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
            return self._note_failure(str(error))
        error_lines = done.stderr.decode(errors="replace").strip().splitlines()
        return self._note_failure(
            "" if done.returncode == 0 else f"exit {done.returncode}: {error_lines[-1:]}"
        )

    def _is_unclaimed(self) -> bool:
        with claim_recording(self._account().uid, labctl_home()) as free:
            return free

    def _note_failure(self, failure: str) -> bool:
        if failure and failure != self._failed:
            self._say("telemetry interrupted", failure)
        self._failed = failure
        return not failure

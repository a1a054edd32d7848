"""The keeper's worker processes, one for each lab that needs more than a check."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from labctl.errors import BusyError, LabError
from labctl.errors.replies import decode_reply
from labctl.wire.codec import MessageError
from labctl.wire.kept_labs import RECOVER_RUNS

END_S = 3.0


class RecoveryWorkers:
    """The worker processes.

    `run_worker` runs one; `end_all` ends all, within about END_S seconds.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._guard = threading.Lock()
        self._ended = False

    def run_worker(self, name: str) -> None:
        """Run a worker for a kept lab and wait for it; raise the LabError that it ended with.

        The worker ends with this process, because it reads its standard input, which ends then.
        """
        words = [sys.executable, "-m", "labctl", "keep", "--attend", name]
        with self._guard:
            if self._ended:
                raise BusyError("labctl keep is ending")
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            with process:
                assert process.stdout is not None
                output = process.stdout.read()
                code = process.wait()
        finally:
            with self._guard:
                self._running.discard(process)
        with contextlib.suppress(MessageError):
            decode_reply(RECOVER_RUNS.reply, output)
        if code:
            raise LabError(
                f"the recovery of {name} ended with exit code {code}",
                hint=f"labctl keep --attend {name}",
            )

    def end_all(self) -> None:
        """End all workers: SIGTERM to each, then SIGKILL to its whole process group.

        The next keeper continues what was unfinished.
        """
        with self._guard:
            self._ended = True
            running = list(self._running)
        for process in running:
            # Not to its group: its own cleanup over ssh would fail.
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

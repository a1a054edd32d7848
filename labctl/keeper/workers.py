"""The keeper's processes of their own, one for each lab that needs more than a look."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from labctl.errors import BusyError, LabError
from labctl.errors.replies import raised, reply_in

END_S = 3.0


class Attendants:
    """`attend` waits for one; `end_all` ends those that go on, within END_S or so."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._guard = threading.Lock()
        self._ended = False

    def attend(self, name: str) -> None:
        """Have the ward looked after; the LabError that it ended with. It ends with this process:
        it reads its standard input, which ends then."""
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
                said = process.stdout.read()
                code = process.wait()
        finally:
            with self._guard:
                self._running.discard(process)
        if (error := raised(reply_in(said) or {})) is not None:
            raise error
        if code:
            raise LabError(
                f"looking after {name} ended with exit code {code}",
                hint=f"labctl keep --attend {name}",
            )

    def end_all(self) -> None:
        """SIGTERM to each, then SIGKILL, to what it has started too. Whatever was half-done then is
        gone on with by the next keeper."""
        with self._guard:
            self._ended = True
            left = list(self._running)
        for process in left:
            # Not to its group: what it does with ssh on its way out would fail.
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

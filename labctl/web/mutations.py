"""What the dashboard does to servers: with the very functions that the command line calls.

Everything here may take seconds, and belongs into a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labctl.config import Paths
from labctl.courses import broadcast
from labctl.courses.context import course_ground, seat_grounds
from labctl.courses.loading import open_course
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.servers import Staff
from labctl.courses.status import ground_of, look_at
from labctl.errors import UsageError
from labctl.events import Silent
from labctl.insight import top
from labctl.lifecycle.status import keep_watch
from labctl.model import NAME_PATTERN, Run, Server
from labctl.runs import runs
from labctl.servers.context import Ground
from labctl.state import State
from labctl.web.view import Gauge

# What a cancelled run has to write a checkpoint, as with `labctl cancel`.
GRACE_S = 60
BY = "dashboard"


class Deeds:
    """One course's. The folder is opened anew here: nobody else reads through it."""

    def __init__(self, path: Path, paths: Paths, state: State) -> None:
        self._path = path
        self._paths = paths
        self._state = state
        self._lock = threading.Lock()
        self._folder: CourseFolder | None = None
        self._course: Ground | None = None

    def extend(self, seat: str, span_s: int, why: str) -> dict[str, Any]:
        """More time for a seat's server; W of its watchdog. As `labctl course extend`."""
        with self._lock:
            staff, found = self._at(seat)
            watch = broadcast.extend(staff, found, span_s, why)
            server = self._state.server_of_lab(found.lab_id)
            if server is not None:
                # What the watchdog has just said is news for whoever looks.
                keep_watch(ground_of(staff, found), server, watch)
        return watch

    def cancel(self, seat: str, run_id: str) -> tuple[Run, bool]:
        """End a run; (the run, whether it had ended before). As `labctl cancel`."""
        lab, server, run = self.run_of(seat, run_id)
        return runs.cancel(lab, server, run.id, GRACE_S)

    def run_of(self, seat: str, run_id: str) -> tuple[Ground, Server, Run]:
        """Where a run is. NotFoundError where the seat's server does not know it."""
        if not NAME_PATTERN.fullmatch(run_id):
            raise UsageError("no run bears such a name")
        with self._lock:
            staff, found = self._at(seat)
        return broadcast.run_of(staff, found, run_id)

    def look(self, seat: str) -> Gauge | None:
        """Have the seat's runs and its watchdog's word recorded as they are now, asked over SSH.

        How busy its processors are; None where it has no server that is up.
        """
        with self._lock:
            staff, found = self._at(seat)
            if self._course is None:
                self._course = course_ground(staff.folder, self._paths, self._state, staff.reporter)
            (ground,) = seat_grounds(
                staff.folder,
                self._paths,
                self._state,
                staff.reporter,
                [found],
                course=self._course,
            )
        server = self._state.server_of_lab(found.lab_id)
        if server is None or server.state != "running":
            return None
        look_at(ground, server)
        return to_gauge(top.look(ground))

    def _at(self, seat: str) -> tuple[Staff, Seat]:
        if self._folder is None:
            self._folder = open_course(self._path)
        self._folder.refresh()
        staff = Staff(self._folder, self._paths, self._state, Silent(), by=BY)
        return staff, self._folder.seat(seat)


def to_gauge(now: top.ServerNow) -> Gauge:
    """Sums over the GPUs of a server; a MIG instance counts with its card."""
    cards = [one for one in now.gpus if not one.parent]
    used = [one.use_percent for one in cards if one.use_percent is not None]
    memory = [one.memory_bytes for one in cards if one.memory_bytes is not None]
    whole = [one.memory_total_bytes for one in cards if one.memory_total_bytes is not None]
    cpu = None if now.cpu_cores is None or not now.cores else 100 * now.cpu_cores / now.cores
    return Gauge(
        at=now.at,
        gpus=len(cards),
        gpu_percent=round(sum(used) / len(used)) if used else None,
        gpu_memory_bytes=sum(memory) if memory else None,
        gpu_memory_total_bytes=sum(whole) if whole else None,
        cpu_percent=None if cpu is None else round(cpu),
    )


class Reading:
    """A run's log, read on from where it stopped.

    `began_anew` counts gaps: the log of a restored run, a flood.
    """

    def __init__(self, lab: Ground, server: Server, run: Run, tail_lines: int, most: int) -> None:
        self._lab = lab
        self._server = server
        self._most = most
        self._tail = tail_lines
        self._lines = tail_lines
        self._offset = 0
        self._attempt = ""
        self.run = run
        self.began_anew = 0

    def read_on(self, on_bytes: Callable[[bytes], None]) -> None:
        """What was written since the last time. ConnectError: the server cannot be reached."""
        request: dict[str, Any] = {
            "lab": self._lab.config.name,
            "lab_id": self._lab.lab_id,
            "run": self.run.id,
            "offset": self._offset,
            "wait": False,
            "tail": self._tail,
            "attempt": self._attempt,
        }
        came = 0

        def placed(reply: dict[str, Any]) -> None:
            self.run = runs.keep(self._lab, self._server, reply["run"])
            self._attempt = self.run.container
            if int(reply["offset"]) != self._offset:
                self.began_anew += 1
            self._offset, self._tail = int(reply["offset"]), 0

        def feed(block: bytes) -> None:
            nonlocal came
            came += len(block)
            if came > self._most:
                raise _FloodError
            self._offset += len(block)
            on_bytes(block)

        try:
            closing = self._lab.remote(self._server).stream(
                "follow", request, on_reply=placed, on_bytes=feed
            )
            self.run = runs.keep(self._lab, self._server, closing["run"])
        except _FloodError:
            # More than anybody reads: the next look begins at the end again.
            self._tail = self._lines


class _FloodError(Exception):
    pass

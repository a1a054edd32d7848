"""The dashboard's actions on servers, by the same functions that the command line calls.

Each of them may take seconds, so they are called in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from labctl.config import Paths
from labctl.courses import broadcast, server_contents, server_starters, starters
from labctl.courses.context import build_course_context, build_seat_contexts
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.servers import CourseOperator
from labctl.courses.status import build_seat_context, find_server, refresh_server
from labctl.errors import NotFoundError, UsageError
from labctl.events import SilentReporter
from labctl.insight import top
from labctl.lifecycle.status import record_watch
from labctl.model import NAME_PATTERN, Run, Server
from labctl.runs import runs
from labctl.servers.context import LabContext
from labctl.state import State
from labctl.sync.starter_update import FileChange
from labctl.web.view import ServerLoad
from labctl.wire.runs import FOLLOW_RUN, FollowRunOpening, FollowRunRequest
from labctl.wire.watchdog import WatchRecord

# time that a canceled run has to write a checkpoint, as with `labctl cancel`
GRACE_S = 60
# who acts, if nobody entered a name
BY = "dashboard"


class CourseActions:
    """The actions on one course. It has its own CourseFolder, which no other thread uses."""

    def __init__(self, path: Path, paths: Paths, state: State) -> None:
        self._path = path
        self._paths = paths
        self._state = state
        self._lock = threading.Lock()
        self._folder: CourseFolder | None = None
        self._course: LabContext | None = None

    def extend(self, seat: str, span_s: int, why: str, by: str = BY) -> WatchRecord | None:
        """Extend the time of a seat's server, as `labctl course extend`; return its limits."""
        with self._lock:
            staff, course_seat = self._open_seat(seat, by)
            watch = broadcast.extend_server(staff, course_seat, span_s, why)
            server = self._state.get_lab_server(course_seat.lab_id)
            if server is not None:
                # Record the watchdog's report, so that the pages show the new limits.
                record_watch(build_seat_context(staff, course_seat), server, watch)
        return watch

    def cancel(self, seat: str, run_id: str, by: str = BY) -> tuple[Run, bool]:
        """Stop a run, as `labctl cancel`; return it, and whether it had already ended.

        The ledger records who canceled a run that was active.
        """
        lab, server, run = self.find_run(seat, run_id)
        ended_run, had_ended = runs.cancel(lab, server, run.id, GRACE_S)
        if not had_ended:
            with self._lock:
                staff, course_seat = self._open_seat(seat, by)
                student = by if by in course_seat.students else ""
                staff.folder.ledger.append("cancel", seat=seat, student=student, by=by, run=run.id)
        return ended_run, had_ended

    def find_run(self, seat: str, run_id: str) -> tuple[LabContext, Server, Run]:
        """Return a run with its lab and server; NotFoundError if the server has no such run."""
        if not NAME_PATTERN.fullmatch(run_id):
            raise UsageError("this is not a valid run id")
        with self._lock:
            staff, course_seat = self._open_seat(seat)
        return broadcast.find_run(staff, course_seat, run_id)

    def open_lab(self, seat: str, lab_id: str) -> tuple[LabContext, Server]:
        """Return a lab on a seat's server; NotFoundError without server or lab."""
        with self._lock:
            staff, course_seat = self._open_seat(seat)
        server = find_server(staff, course_seat)
        context = build_seat_context(staff, course_seat)
        if lab_id == context.lab_id:
            return context, server
        for lab in server_contents.list_labs(context, server):
            if lab.lab_id == lab_id:
                return lab, server
        raise NotFoundError("this lab has no files on the server yet", hint="labctl push")

    def write_starter(self, seat: str, assignment: str) -> tuple[FileChange, ...]:
        """Write an assignment's published starter into the seat's own lab on its server.

        Deleted files come back. Return what was done, and every file of the student's that differs.
        """
        with self._lock:
            staff, course_seat = self._open_seat(seat)
        starter = starters.find_published(staff.folder, assignment)
        if starter is None:
            raise NotFoundError(f"{assignment} hands out no files")
        lab, server = self.open_lab(seat, course_seat.lab_id)
        return server_starters.write_starter(lab, server, starter, restore=True)

    def read_load(self, seat: str) -> ServerLoad | None:
        """Read a seat's server over SSH, record its runs and limits, and return its load.

        None if the seat has no running server.
        """
        with self._lock:
            staff, course_seat = self._open_seat(seat)
            if self._course is None:
                self._course = build_course_context(
                    staff.folder, self._paths, self._state, staff.reporter
                )
            (context,) = build_seat_contexts(
                staff.folder,
                self._paths,
                self._state,
                staff.reporter,
                [course_seat],
                course=self._course,
            )
        server = self._state.get_lab_server(course_seat.lab_id)
        if server is None or server.state != "running":
            return None
        refresh_server(context, server)
        return make_load(top.measure_now(context))

    def _open_seat(self, seat: str, by: str = BY) -> tuple[CourseOperator, Seat]:
        if self._folder is None:
            self._folder = CourseFolder(self._path)
        self._folder.refresh()
        staff = CourseOperator(self._folder, self._paths, self._state, SilentReporter(), by=by)
        return staff, self._folder.find_seat(seat)


def make_load(now: top.ServerMetrics) -> ServerLoad:
    """Aggregate the GPUs of a server: mean use, total memory. MIG instances count as their card."""
    cards = [gpu for gpu in now.gpus if not gpu.parent]
    used = [gpu.use_percent for gpu in cards if gpu.use_percent is not None]
    memory = [gpu.memory_bytes for gpu in cards if gpu.memory_bytes is not None]
    total = [gpu.memory_total_bytes for gpu in cards if gpu.memory_total_bytes is not None]
    cpu = None if now.cpu_cores is None or not now.cores else 100 * now.cpu_cores / now.cores
    return ServerLoad(
        at=now.at,
        gpus=len(cards),
        gpu_percent=round(sum(used) / len(used)) if used else None,
        gpu_memory_bytes=sum(memory) if memory else None,
        gpu_memory_total_bytes=sum(total) if total else None,
        cpu_percent=None if cpu is None else round(cpu),
    )


class LogReader:
    """A run's log, whose reading continues at the last position.

    `began_anew` counts gaps: a run that was restored, or more output than can be shown.
    """

    def __init__(
        self, lab: LabContext, server: Server, run: Run, tail_lines: int, most: int
    ) -> None:
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
        """Read what was written since the last call. ConnectError if the server is unreachable."""
        request = FollowRunRequest(
            self._lab.config.name,
            self._lab.lab_id,
            self.run.id,
            offset=self._offset,
            tail=self._tail,
            attempt=self._attempt,
        )
        received_bytes = 0

        def set_position(reply: FollowRunOpening) -> None:
            self.run = runs.record_run(self._lab, self._server, reply.run)
            self._attempt = self.run.container
            if reply.offset != self._offset:
                self.began_anew += 1
            self._offset, self._tail = reply.offset, 0

        def feed(block: bytes) -> None:
            nonlocal received_bytes
            received_bytes += len(block)
            if received_bytes > self._most:
                raise _FloodError
            self._offset += len(block)
            on_bytes(block)

        try:
            closing = self._lab.open_agent(self._server).stream(
                FOLLOW_RUN, request, on_reply=set_position, on_bytes=feed
            )
            self.run = runs.record_run(self._lab, self._server, closing.run)
        except _FloodError:
            # This is more than anybody reads; the next call starts at the end of the log.
            self._tail = self._lines


class _FloodError(Exception):
    pass

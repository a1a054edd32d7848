"""`labctl course serve`: the keeper's process, which runs periodic tasks until it is stopped.

All of its state is on disk: after a kill at any moment, the next keeper continues. Servers, runs
and watchdogs continue without it.
"""

from __future__ import annotations

import time

from labctl.courses.assignment_seats import freeze_closed
from labctl.courses.backup import LedgerBackup, open_course_store
from labctl.courses.invitation import withdraw_expired
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.publish import publish_assignments, read_host_key
from labctl.courses.requests import RequestHandler
from labctl.courses.seat_reporter import SeatNews
from labctl.courses.servers import CourseOperator
from labctl.courses.tasks import CourseTasks
from labctl.errors import NotFoundError, assign_subject
from labctl.errors.subject import COURSE
from labctl.events import AGREE_TO_ALL, Event, Note, PolicyReporter
from labctl.keeper.scheduler import Report, Scheduler, Task

LONGEST_PAUSE_S = 600.0
EVERY_S = {
    "sweep": 60.0,
    "watch": 60.0,
    "disks": 3600.0,
    "roster": 15.0,
    "backup": 30.0,
    "invitations": 300.0,
    "assignments": 60.0,
    "hours": 3600.0,
}


def make_course_log_reporter(notify: Report) -> PolicyReporter:
    """Return a reporter that writes warnings to the keeper's log, and agrees to everything.

    course.yaml has settled prices, limits and times. If no guard at the provider ends billing, the
    keeper itself does.
    """

    def show(event: Event) -> None:
        if isinstance(event, SeatNews) and event.warning:
            notify(event.seat, event.text)
        elif isinstance(event, Note) and event.level == "warning":
            notify("", event.text)

    return PolicyReporter(show, AGREE_TO_ALL)


class CourseScheduler:
    """The keeper's periodic tasks. `run` returns once `stop` is set."""

    def __init__(
        self,
        staff: CourseOperator,
        request_handler: RequestHandler,
        keys: AuthorizedKeys,
        *,
        notify: Report,
    ) -> None:
        self.tasks = CourseTasks(staff, request_handler, keys, notify)
        self._staff, self._request_handler = staff, request_handler
        self._keys, self._notify = keys, notify
        self._backup: LedgerBackup | None = None
        work = {
            "sweep": self._sweep,
            "watch": self.tasks.refresh_status,
            "disks": self.tasks.remove_disks,
            "roster": self.tasks.apply_roster,
            "backup": self._save_backup,
            "invitations": self._withdraw_invitations,
            "assignments": self._publish_assignments,
            "hours": self.tasks.reserve_hours,
        }
        self.scheduler = Scheduler(self._report, at_once=len(work))
        self.stop = self.scheduler.stop
        for name, run in work.items():
            task = assign_subject(COURSE)(run)
            self.scheduler.add(Task(name, task, EVERY_S[name], LONGEST_PAUSE_S))

    def restore(self) -> None:
        """Restore the ledger and resume unfinished seats. Call it before answering any student."""
        store = open_course_store(self._staff)
        if store is not None:
            self._backup = LedgerBackup(self._staff.folder, store)
            if count := self._backup.restore():
                self._notify("", f"restored {count} ledger lines from {store.url}")
        for seat_server in self._request_handler.list_seat_servers():
            seat_server.resume()

    def run(self) -> None:
        self.scheduler.run()

    def _report(self, task: str, text: str) -> None:
        self._notify("", f"{task}: {text}")

    def _sweep(self) -> None:
        snapshot = self.tasks.take_snapshot()
        self.tasks.sweep(snapshot)
        self.tasks.apply_class_hours(snapshot)

    def _save_backup(self) -> None:
        if self._backup is not None:
            self._backup.save()

    def _withdraw_invitations(self) -> None:
        for student in withdraw_expired(self._staff.folder, self._keys, time.time()):
            self._notify(student, "the join file has expired")

    def _publish_assignments(self) -> None:
        freeze_closed(self._staff.folder, by="keeper")
        try:
            host_key = read_host_key(self._staff.folder)
        except NotFoundError:
            return  # nobody was invited yet
        for name in publish_assignments(self._staff.folder, host_key):
            self._notify("", f"{name}: published as in course.yaml")

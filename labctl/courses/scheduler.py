"""`labctl course serve`: the keeper's process, which runs periodic tasks until it is stopped.

All of its state is on disk: after a kill at any moment, the next keeper continues. Servers, runs
and watchdogs continue without it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from labctl.courses.assignment_seats import freeze_closed
from labctl.courses.backup import Backup, course_store
from labctl.courses.invitation import withdraw_expired
from labctl.courses.keys import Keys
from labctl.courses.publish import known_host_key, publish
from labctl.courses.requests import Desk
from labctl.courses.seat_reporter import News
from labctl.courses.servers import Staff
from labctl.courses.tasks import Rounds
from labctl.errors import LabError, NotFoundError
from labctl.errors.replies import as_reply
from labctl.errors.unexpected import as_lab_error
from labctl.events import Decision, Event, Note

TICK_S = 1.0
LONGEST_PAUSE_S = 600.0
EVERY_S = {
    "sweep": 60.0,
    "watch": 60.0,
    "disks": 3600.0,
    "roster": 15.0,
    "backup": 30.0,
    "invitations": 300.0,
    "assignments": 60.0,
}
# Called with a seat's name ("" for none) and a message.
Tell = Callable[[str, str], None]


class Yes:
    """A Reporter that agrees to everything: course.yaml has settled prices, limits and times.

    If no guard at the provider ends billing, the keeper itself does.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def emit(self, event: Event) -> None:
        if isinstance(event, News) and event.warning:
            self._tell(event.seat, event.text)
        elif isinstance(event, Note) and event.level == "warning":
            self._tell("", event.text)

    def ask(self, decision: Decision) -> bool:
        return True


@dataclass
class Task:
    """A periodic action and its state. After failures it runs less and less often."""

    name: str
    action: Callable[[], None]
    every_s: float
    due: float = 0.0
    pause_s: float = 0.0
    error: str = ""
    guard: threading.Lock = field(default_factory=threading.Lock)


class Vigil:
    """The keeper's periodic tasks. `run` returns once `stop` is set."""

    def __init__(self, staff: Staff, desk: Desk, keys: Keys, *, tell: Tell) -> None:
        self.stop = threading.Event()
        self.rounds = Rounds(staff, desk, keys, tell)
        self._staff, self._desk, self._keys, self._tell = staff, desk, keys, tell
        self._backup: Backup | None = None
        actions = {
            "sweep": self._sweep,
            "watch": self.rounds.watch,
            "disks": self.rounds.disks,
            "roster": self.rounds.roster,
            "backup": self._save_backup,
            "invitations": self._withdraw_invitations,
            "assignments": self._publish_assignments,
        }
        self.tasks = [Task(name, action, EVERY_S[name]) for name, action in actions.items()]

    def begin(self) -> None:
        """Restore the ledger and resume unfinished seats. Call it before answering any student."""
        store = course_store(self._staff)
        if store is not None:
            self._backup = Backup(self._staff.folder, store)
            if count := self._backup.bring_back():
                self._tell("", f"restored {count} ledger lines from {store.url}")
        for desk in self._desk.seats():
            desk.go_on()

    def run(self) -> None:
        while not self.stop.is_set():
            self.tick()
            self.stop.wait(TICK_S)

    def tick(self) -> list[threading.Thread]:
        """Start each task that is due and not running; return the new threads."""
        threads = []
        for task in self.tasks:
            if time.monotonic() >= task.due and task.guard.acquire(blocking=False):
                thread = threading.Thread(target=self._run_task, args=(task,), daemon=True)
                thread.start()
                threads.append(thread)
        return threads

    def _run_task(self, task: Task) -> None:
        try:
            task.action()
        except Exception as error:
            self._record_failure(task, as_lab_error(error, partial(self._tell, "")))
        else:
            if task.error:
                self._tell("", f"{task.name}: working again")
            task.error, task.pause_s = "", task.every_s
        finally:
            task.due = time.monotonic() + (task.pause_s or task.every_s) * random.uniform(0.9, 1.1)
            task.guard.release()

    def _record_failure(self, task: Task, error: LabError) -> None:
        task.pause_s = min(LONGEST_PAUSE_S, 2 * (task.pause_s or task.every_s))
        why = as_reply(error)["error"]["why"].replace("\n", "; ")
        message = ": ".join(filter(None, [error.what, why]))
        if message != task.error:
            hint = f"; next: {error.hint}" if error.hint else ""
            self._tell("", f"{task.name}: {message}{hint}")
        task.error = message

    def _sweep(self) -> None:
        look = self.rounds.look()
        self.rounds.sweep(look)
        self.rounds.hours(look)

    def _save_backup(self) -> None:
        if self._backup is not None:
            self._backup.save()

    def _withdraw_invitations(self) -> None:
        for student in withdraw_expired(self._staff.folder, self._keys, time.time()):
            self._tell(student, "the join file has expired")

    def _publish_assignments(self) -> None:
        freeze_closed(self._staff.folder, by="keeper")
        try:
            host_key = known_host_key(self._staff.folder)
        except NotFoundError:
            return  # nobody was invited yet
        for name in publish(self._staff.folder, host_key):
            self._tell("", f"{name}: published as in course.yaml")

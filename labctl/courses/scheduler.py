"""`labctl course serve`: the keeper's process. Deeds come round at their times until it is stopped.

It holds nothing that is not on disk: killed at any moment, the next one goes on. Servers, runs and
watchdogs go on without it.
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
    "look": 60.0,
    "watch": 60.0,
    "disks": 3600.0,
    "roster": 15.0,
    "backup": 30.0,
    "invitations": 300.0,
    "assignments": 60.0,
}
# Takes a seat's name ("" for none) and what happened.
Tell = Callable[[str, str], None]


class Yes:
    """A Reporter for what course.yaml has settled: prices within ceilings, ends at their times.

    Where no guard ends billing the keeper does: it is the one that would have been asked for.
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
    """A deed, how often it comes, and how it went: after a failure it comes ever more rarely."""

    name: str
    deed: Callable[[], None]
    every_s: float
    due: float = 0.0
    pause_s: float = 0.0
    error: str = ""
    guard: threading.Lock = field(default_factory=threading.Lock)


class Vigil:
    """Made once per process; `run` goes on until `stop` is set."""

    def __init__(self, staff: Staff, desk: Desk, keys: Keys, *, tell: Tell) -> None:
        self.stop = threading.Event()
        self.rounds = Rounds(staff, desk, keys, tell)
        self._staff, self._desk, self._keys, self._tell = staff, desk, keys, tell
        self._backup: Backup | None = None
        deeds = {
            "look": self._look,
            "watch": self.rounds.watch,
            "disks": self.rounds.disks,
            "roster": self.rounds.roster,
            "backup": self._save,
            "invitations": self._invitations,
            "assignments": self._assignments,
        }
        self.tasks = [Task(name, deed, EVERY_S[name]) for name, deed in deeds.items()]

    def begin(self) -> None:
        """What must be so before a student is answered: the ledger is whole, seats go on."""
        place = course_store(self._staff)
        if place is not None:
            self._backup = Backup(self._staff.folder, place)
            if count := self._backup.bring_back():
                self._tell("", f"{count} lines of the ledger are back from {place.url}")
        for desk in self._desk.seats():
            desk.go_on()

    def run(self) -> None:
        while not self.stop.is_set():
            self.tick()
            self.stop.wait(TICK_S)

    def tick(self) -> list[threading.Thread]:
        """Begin each deed that is due and not going on; the threads that do."""
        begun = []
        for task in self.tasks:
            if time.monotonic() >= task.due and task.guard.acquire(blocking=False):
                thread = threading.Thread(target=self._do, args=(task,), daemon=True)
                thread.start()
                begun.append(thread)
        return begun

    def _do(self, task: Task) -> None:
        try:
            task.deed()
        except Exception as error:
            self._note(task, as_lab_error(error, partial(self._tell, "")))
        else:
            if task.error:
                self._tell("", f"{task.name}: all is well again")
            task.error, task.pause_s = "", task.every_s
        finally:
            task.due = time.monotonic() + (task.pause_s or task.every_s) * random.uniform(0.9, 1.1)
            task.guard.release()

    def _note(self, task: Task, error: LabError) -> None:
        task.pause_s = min(LONGEST_PAUSE_S, 2 * (task.pause_s or task.every_s))
        why = as_reply(error)["error"]["why"].replace("\n", "; ")
        said = ": ".join(filter(None, [error.what, why]))
        if said != task.error:
            hint = f"; next: {error.hint}" if error.hint else ""
            self._tell("", f"{task.name}: {said}{hint}")
        task.error = said

    def _look(self) -> None:
        look = self.rounds.look()
        self.rounds.sweep(look)
        self.rounds.hours(look)

    def _save(self) -> None:
        if self._backup is not None:
            self._backup.save()

    def _invitations(self) -> None:
        for student in withdraw_expired(self._staff.folder, self._keys, time.time()):
            self._tell(student, "the join file was not used in time and opens nothing any more")

    def _assignments(self) -> None:
        freeze_closed(self._staff.folder, by="keeper")
        try:
            host_key = known_host_key(self._staff.folder)
        except NotFoundError:
            return  # nobody was invited yet
        for name in publish(self._staff.folder, host_key):
            self._tell("", f"{name} is now as course.yaml has it")

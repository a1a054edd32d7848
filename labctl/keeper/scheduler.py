"""The loop of a keeper: tasks that come round, each in a thread, with a back-off of its own.

`labctl keep` has one task for each lab, `labctl course serve` a list of them for its course. A task
that fails stops no other. Nothing is kept in memory that a restart would need.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from labctl.errors import BusyError, LabError, LockHeldError
from labctl.errors.replies import describe_error
from labctl.errors.unexpected import as_lab_error
from labctl.state.locks import hold_lock
from labctl.text import add_next

TICK_S = 1.0
START_WAIT_S = 2.0

# Takes the name of a task, lab or seat ("" for none) and what happened.
Report = Callable[[str, str], None]


@contextmanager
def hold_alone(lock: Path, command: str, *, already: str, hint: str) -> Iterator[None]:
    """Be the only process of this user that runs `command`; BusyError(already) where one does."""
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(lock, command, wait_s=START_WAIT_S))
        except LockHeldError as error:
            raise BusyError(already, why=error.holder, hint=hint) from None
        yield


@dataclass
class Task:
    """Work that comes round every `every_s` seconds, or after as many as `run` returns.

    `run` raises LabError where it could not do its work now. Then the pause begins at `every_s` and
    doubles with each further failure, up to `longest_pause_s`.
    """

    name: str
    run: Callable[[], float | None]
    every_s: float
    longest_pause_s: float
    # On the monotonic clock.
    due_at: float = 0.0
    # After the last failure; 0.0 after a success.
    pause_s: float = 0.0
    error: str = ""
    is_running: bool = False


def _ignore(task: Task, error: LabError | None, pause_s: float) -> None:
    pass


class Scheduler:
    """Runs its tasks when they are due, until `stop` is set. Any thread may add and remove tasks.

    `on_done` gets each task that has run, its error or None, and the seconds until it comes again.
    """

    def __init__(
        self,
        report: Report,
        *,
        at_once: int,
        on_done: Callable[[Task, LabError | None, float], None] = _ignore,
    ) -> None:
        self.stop = threading.Event()
        self.tasks: dict[str, Task] = {}
        self._report = report
        self._at_once = at_once
        self._on_done = on_done
        self._guard = threading.Lock()

    def add(self, task: Task) -> None:
        """Add a task, due at once; one of its name that is there is due at once, too."""
        with self._guard:
            self.tasks.setdefault(task.name, task).due_at = 0.0

    def remove(self, name: str) -> None:
        """Let a task come no more. One that is running runs to its end."""
        with self._guard:
            self.tasks.pop(name, None)

    def make_all_due(self) -> None:
        with self._guard:
            for task in self.tasks.values():
                task.due_at = 0.0

    def run(self, before_tick: Callable[[], None] = lambda: None) -> None:
        """Run tasks until `stop`. Those that are running then may still go on when this returns."""
        while not self.stop.is_set():
            before_tick()
            self.start_due_tasks()
            self.stop.wait(TICK_S)

    def start_due_tasks(self) -> list[threading.Thread]:
        """Start each task that is due and not running; the threads that run them."""
        threads = []
        with self._guard:
            running = sum(task.is_running for task in self.tasks.values())
            for _, task in sorted(self.tasks.items()):
                if running == self._at_once:
                    break
                if task.is_running or task.due_at > time.monotonic():
                    continue
                running += 1
                task.is_running = True
                threads.append(threading.Thread(target=self._run, args=(task,), daemon=True))
        for thread in threads:
            thread.start()
        return threads

    def _run(self, task: Task) -> None:
        error: LabError | None = None
        pause_s: float | None = None
        try:
            pause_s = task.run()
        except Exception as failure:
            error = as_lab_error(failure, lambda text: self._report(task.name, text))
        if error is None:
            task.pause_s = 0.0
        else:
            task.pause_s = min(task.longest_pause_s, 2 * task.pause_s or task.every_s)
        # At random, so that tasks do not all come at the same moment.
        pause_s = (task.pause_s or pause_s or task.every_s) * random.uniform(0.9, 1.1)
        self._report_change(task, error, pause_s)
        self._on_done(task, error, pause_s)
        with self._guard:
            task.due_at = time.monotonic() + pause_s
            task.is_running = False

    def _report_change(self, task: Task, error: LabError | None, pause_s: float) -> None:
        """Report an error once, and its end."""
        text = describe_error(error) if error else ""
        if error is not None and text != task.error:
            report = add_next(f"{text}; trying again in {pause_s:.0f} s", error.hint)
            self._report(task.name, report)
        if error is None and task.error:
            self._report(task.name, "working again")
        task.error = text

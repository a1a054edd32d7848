"""`labctl keep`: checks every lab that was handed over, and has the one in trouble recovered.

A check of a quiet lab is one ssh command. A recovery (`attend`) runs in a process of its own, so
that this one stays small and ends at once when it is asked to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from labctl.config import Paths
from labctl.errors import BusyError, LabError
from labctl.events import Decision, Event, Note, Silent, Step
from labctl.keeper.scheduler import Report, Scheduler, Task, hold_alone
from labctl.lifecycle import kept_labs
from labctl.lifecycle.kept_labs import Round, Ward
from labctl.model import Run
from labctl.runs import outputs, runs
from labctl.servers.context import Ground
from labctl.state import State
from labctl.state.disks import has_expired, list_kept_disks
from labctl.state.locks import hold_lock

EVERY_S = 15.0
ENDED_EVERY_S = 60.0
SWEPT_EVERY_S = 3600.0
LONGEST_PAUSE_S = 300.0
AT_ONCE = 12
WELL, ENDED, SWEPT, TROUBLE = "well", "ended", "swept", "trouble"
# Helps a ward; LabError where it could not be helped now.
Attend = Callable[[str], None]


class Journal:
    """A Reporter of the keeper: lines for the log. It says yes to prices, which wards limit."""

    def __init__(self, tell: Report, name: str) -> None:
        self._tell = tell
        self._name = name

    def emit(self, event: Event) -> None:
        if isinstance(event, Note) and event.level != "detail":
            self._tell(self._name, event.text)
        elif isinstance(event, Step):
            done = f": done{f' ({event.detail})' if event.detail else ''}" if event.done else ""
            self._tell(self._name, f"{event.name}{done}")

    def ask(self, decision: Decision) -> bool:
        return decision.about == "price"


def only_keeper(places: Paths) -> AbstractContextManager[None]:
    """Be this user's keeper here; BusyError names the process that is it already."""
    return hold_alone(
        _lock(places),
        "labctl keep",
        already="labctl keep runs here already",
        hint="labctl keep --list",
    )


def is_running(places: Paths) -> bool:
    """Whether a keeper of this user runs here now."""
    if not _lock(places).exists():
        return False
    try:
        with hold_lock(_lock(places), "looking whether labctl keep runs", wait_s=0.0):
            return False
    except BusyError:
        return True


def _lock(places: Paths) -> Path:
    return places.keep_dir / ".locks" / "keep"


class Keeper:
    """Made once per process; `run` goes on until `stop` is set."""

    def __init__(
        self,
        places: Paths,
        state: State,
        environ: Mapping[str, str],
        *,
        tell: Report,
        attend: Attend,
        ground: Callable[[Ward], Ground] | None = None,
    ) -> None:
        self.rounds: dict[str, Round] = {}
        self._scheduler = Scheduler(tell, at_once=AT_ONCE, on_done=self._note)
        self.stop = self._scheduler.stop
        self._places, self._state, self._environ = places, state, environ
        self._tell, self._attend = tell, attend
        self._ground = ground or self._own_ground
        # The labs in its care, by name: when each was handed over, as its record's time of change.
        self._handed_over: dict[str, int] = {}
        self._begun = False
        self._disks_due: dict[str, float] = {}
        self._states: dict[str, str] = {}
        self._guard = threading.Lock()

    def run(self) -> None:
        """Check labs until `stop`. A check that is running may still go on when this returns."""
        rounds = kept_labs.read_rounds(self._places)
        self.rounds = {name: last for name, last in rounds.items() if last.state == SWEPT}
        self._scheduler.run(before_tick=self._update_tasks)

    def make_all_due(self) -> None:
        """Have every lab checked by the next `tick`, whenever its turn would be."""
        self._scheduler.make_all_due()

    def tick(self) -> list[threading.Thread]:
        """Start a check of each lab that is due; the threads that run them."""
        self._update_tasks()
        return self._scheduler.tick()

    def _update_tasks(self) -> None:
        """Labs that came are checked now, and so are those that were handed over again."""
        labs = {}
        for path in self._places.keep_dir.glob(f"[!.]*/{kept_labs.RECORD}"):
            try:
                labs[path.parent.name] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
        for name in self._handed_over.keys() - labs.keys():
            self._tell(name, "is kept no longer")
            self._scheduler.remove(name)
            self.rounds.pop(name, None)
        for name, changed in labs.items():
            if self._handed_over.get(name) != changed:
                check = partial(self._check, name)
                self._scheduler.add(Task(name, check, EVERY_S, LONGEST_PAUSE_S))
                if self._begun:
                    self._tell(name, "was handed over")
        self._begun = True
        if self._handed_over != labs:
            self._handed_over = labs
            self._write()

    def _check(self, name: str) -> float:
        """Check one lab, and return the seconds until the next time."""
        with kept_labs.worked_on(self._places, name, "a round of labctl keep"):
            state = self._check_lab(name)
        self._states[name] = state
        return {WELL: EVERY_S, ENDED: ENDED_EVERY_S}.get(state, SWEPT_EVERY_S)

    def _check_lab(self, name: str) -> str:
        one = kept_labs.ward(self._places, name)
        ground = self._ground(one)
        before = _states(ground, one)
        state = look(ground, one, swept=self._swept(name))
        if state == TROUBLE:
            if _open(ground, one):
                self._tell(name, "its server does not answer, or has lost a run: a closer look")
            self._attend(name)
            ended = not _open(ground, one)
            gone = ground.state.server_of_lab(ground.lab_id) is None
            state = SWEPT if ended and gone else ENDED if ended else WELL
        elif self._has_expired(name, ground):
            self._attend(name)
        for run_id, said in _states(ground, one).items():
            if before.get(run_id) != said:
                self._tell(name, f"{run_id}: {said}")
        return state

    def _note(self, task: Task, error: LabError | None, pause_s: float) -> None:
        """Keep what the check has found, for `labctl keep --list` and for the next keeper."""
        now = time.time()
        last = Round(
            at=now,
            next_at=now + pause_s,
            state=TROUBLE if error else self._states[task.name],
            error=task.error,
            hint=error.hint if error else "",
        )
        with self._guard:
            if task.name in self._handed_over:
                self.rounds[task.name] = last
        self._write()

    def _has_expired(self, name: str, ground: Ground) -> bool:
        """Whether a kept disk is to be removed beside what lives; asked of its provider hourly."""
        now = time.monotonic()
        if now < self._disks_due.get(name, 0.0):
            return False
        self._disks_due[name] = now + SWEPT_EVERY_S
        provider = ground.config.server.provider
        return has_expired(ground.state, ground.lab_id, provider)

    def _swept(self, name: str) -> bool:
        before = self.rounds.get(name)
        return before is not None and before.state == SWEPT

    def _own_ground(self, one: Ward) -> Ground:
        # What a look notices at every round is no event.
        return kept_labs.ground(
            one, self._places, self._state, Silent(), self._environ, record_only=True
        )

    def _write(self) -> None:
        with self._guard:
            kept_labs.write_rounds(self._places, self.rounds)


def look(ground: Ground, one: Ward, *, swept: bool = False) -> str:
    """One cheap look at a ward: WELL, ENDED (nothing runs), SWEPT, or TROUBLE: more is needed.

    Without a store, what its runs have made comes here: a recovery goes on from it.
    """
    server = ground.state.server_of_lab(ground.lab_id)
    if server is None:
        kept = list_kept_disks(ground.state, ground.lab_id)
        return SWEPT if swept and not kept and not _open(ground, one) else TROUBLE
    try:
        reply = runs.refresh(ground, server)
        there = {found["id"] for found in reply["runs"]}
        if any(run_id not in there for run_id in _open(ground, one)):
            return TROUBLE
        if any(run.state == "lost" and not run.stopped_by for run in _known(ground, one)):
            return TROUBLE
    except LabError:
        # Whether it is the server, the way there or something passing is for `attend` to find out.
        return TROUBLE
    if not ground.config.store:
        _bring(ground, one, there)
    return WELL if _open(ground, one) else ENDED


def _bring(ground: Ground, one: Ward, there: set[str]) -> None:
    """Outputs of the runs that go on, and of those that have ended since the last look."""
    wanted = [run_id for run_id in one.runs if run_id in there and not _complete(ground, run_id)]
    for run_id in wanted:
        (pulled,) = outputs.pull(ground, ground.server(), [run_id])
        run = ground.state.run(ground.lab_id, run_id)
        if pulled.complete and run is not None and kept_labs.is_over(run):
            _mark(ground, run_id).touch()


def _mark(ground: Ground, run_id: str) -> Path:
    return ground.config.root / ".labctl" / f"whole-{run_id}"


def _complete(ground: Ground, run_id: str) -> bool:
    return _mark(ground, run_id).exists()


def _known(ground: Ground, one: Ward) -> list[Run]:
    return kept_labs.known_runs(ground.state, one)


def _open(ground: Ground, one: Ward) -> list[str]:
    """The runs that are to go on until they end by themselves."""
    over = {run.id for run in _known(ground, one) if kept_labs.is_over(run)}
    return [run_id for run_id in one.runs if run_id not in over]


def _states(ground: Ground, one: Ward) -> dict[str, str]:
    return {run.id: run.told or f"{run.state} on {run.server_id}" for run in _known(ground, one)}


def listed(places: Paths, state: State) -> list[dict[str, Any]]:
    """Every ward with its runs and the keeper's last look at it."""
    seen = kept_labs.read_rounds(places)
    return [
        {
            "name": one.name,
            "lab": one.lab,
            "lab_id": one.lab_id,
            "by": one.by,
            "at": one.at,
            "spent_usd": one.spent_usd,
            "server": state.server_of_lab(one.lab_id),
            "runs": [state.run(one.lab_id, run_id) or run_id for run_id in one.runs],
            "round": seen.get(one.name),
        }
        for one in kept_labs.wards(places)
    ]

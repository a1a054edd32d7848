"""The keeper: a look at every lab in its care, over and over, and help for the one that needs it.

A quiet look is one ssh command. Whatever is more than that (`attend`) is done by a process of its
own, so that this one stays small, and ends at once when it is told to.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from labctl.config import Paths
from labctl.errors import BusyError, LabError, NotFoundError
from labctl.events import Decision, Event, Note, Silent, Step
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
TICK_S = 1.0
AT_ONCE = 12
WELL, ENDED, SWEPT, TROUBLE = "well", "ended", "swept", "trouble"
# Takes a ward's name ("" for none) and what happened.
Tell = Callable[[str, str], None]
# Helps a ward; LabError where it could not be helped now.
Attend = Callable[[str], None]


class Journal:
    """A Reporter of the keeper: lines for the log. It says yes to prices, which wards limit."""

    def __init__(self, tell: Tell, name: str) -> None:
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


@contextmanager
def only_keeper(places: Paths) -> Iterator[None]:
    """Be this user's keeper here; BusyError says who is it already."""
    try:
        with hold_lock(_lock(places), "labctl keep", wait_s=2.0):
            yield
    except BusyError as error:
        if not error.holder:
            raise
        raise BusyError(
            "labctl keep runs here already",
            why=error.holder,
            hint="labctl keep --list",
        ) from None


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
        tell: Tell,
        attend: Attend,
        ground: Callable[[Ward], Ground] | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self.stop = threading.Event()
        self.rounds: dict[str, Round] = {}
        self._places, self._state, self._environ = places, state, environ
        self._tell, self._attend, self._every_s = tell, attend, every_s
        self._ground = ground or self._own_ground
        self._known: dict[str, int] = {}
        self._begun = False
        self._due: dict[str, float] = {}
        self._disks_due: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._busy: set[str] = set()
        self._guard = threading.Lock()

    def run(self) -> None:
        """Rounds, until `stop`. What a look has begun may still go on when this returns."""
        self.rounds = {
            n: r for n, r in kept_labs.read_rounds(self._places).items() if r.state == SWEPT
        }
        while not self.stop.is_set():
            self.tick()
            self.stop.wait(TICK_S)

    def due_now(self) -> None:
        """Have every ward looked at by the next `tick`, whenever its turn would be."""
        with self._guard:
            self._due.clear()

    def tick(self) -> list[threading.Thread]:
        """Begin a look at each ward that is due; the threads that do."""
        begun = []
        self._see_who_is_there()
        now = time.monotonic()
        for name in sorted(self._known):
            with self._guard:
                if name in self._busy or self._due.get(name, 0.0) > now:
                    continue
                if len(self._busy) >= AT_ONCE:
                    break
                self._busy.add(name)
            thread = threading.Thread(target=self._look, args=(name,), daemon=True)
            thread.start()
            begun.append(thread)
        return begun

    def _see_who_is_there(self) -> None:
        """Wards that came are looked at now, and so are those that were handed over again."""
        found = {}
        for path in self._places.keep_dir.glob(f"[!.]*/{kept_labs.RECORD}"):
            try:
                found[path.parent.name] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
        for name in self._known.keys() - found.keys():
            self._tell(name, "is kept no longer")
            self.rounds.pop(name, None)
        for name, changed in found.items():
            if self._known.get(name) != changed:
                self._due[name] = 0.0
                if self._begun:
                    self._tell(name, "was handed over")
        self._begun = True
        if self._known != found:
            self._known = found
            self._write()

    def _look(self, name: str) -> None:
        try:
            with kept_labs.worked_on(self._places, name, "a round of labctl keep"):
                found = self._looked(name)
        except (BusyError, NotFoundError) as error:
            found = Round(at=time.time(), state=TROUBLE, error=error.what, hint=error.hint)
        except LabError as error:
            found = Round(at=time.time(), state=TROUBLE, error=_whole(error), hint=error.hint)
        self._note(name, found)

    def _note(self, name: str, found: Round) -> None:
        before = self.rounds.get(name)
        pause_s = self._pause(name, found) * random.uniform(0.8, 1.2)
        if found.error and (before is None or before.error != found.error):
            hint = f"; next: {found.hint}" if found.hint else ""
            self._tell(name, f"{found.error}{hint}; tried again in {pause_s:.0f} s")
        if not found.error and before is not None and before.error:
            self._tell(name, "all is well again")
        with self._guard:
            next_at = time.time() + pause_s
            if name in self._known:
                self.rounds[name] = msgspec.structs.replace(found, next_at=next_at)
            self._due[name] = time.monotonic() + pause_s
            self._busy.discard(name)
        self._write()

    def _pause(self, name: str, found: Round) -> float:
        """Seconds until the next look: a lab in trouble is asked more and more rarely."""
        if found.state == TROUBLE:
            before = self._pauses.get(name, self._every_s / 2)
            self._pauses[name] = min(2 * before, LONGEST_PAUSE_S)
            return self._pauses[name]
        self._pauses.pop(name, None)
        return {WELL: self._every_s, ENDED: ENDED_EVERY_S}.get(found.state, SWEPT_EVERY_S)

    def _looked(self, name: str) -> Round:
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
        return Round(at=time.time(), state=state)

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


def _whole(error: LabError) -> str:
    return ": ".join(filter(None, [error.what, error.why.replace("\n", "; ")]))


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

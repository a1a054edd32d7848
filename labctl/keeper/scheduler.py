"""The keeper: checks every kept lab periodically, and starts a worker for one that needs help.

A check is one ssh command. Everything else (`attend`) is done by a separate process, so that this
one stays small, and stops at once when asked to.
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
# Called with a kept lab's name ("" for none) and a message.
Tell = Callable[[str, str], None]
# Recovers a kept lab; LabError if that fails now.
Attend = Callable[[str], None]


class Journal:
    """A Reporter that writes the keeper's log. It agrees to prices, which kept labs limit."""

    def __init__(self, tell: Tell, name: str) -> None:
        self._tell = tell
        self._name = name

    def emit(self, event: Event) -> None:
        if isinstance(event, Note) and event.level != "detail":
            self._tell(self._name, event.text)
        elif isinstance(event, Step):
            detail = f" ({event.detail})" if event.detail else ""
            self._tell(self._name, f"{event.name}: done{detail}" if event.done else event.name)

    def ask(self, decision: Decision) -> bool:
        return decision.about == "price"


@contextmanager
def only_keeper(places: Paths) -> Iterator[None]:
    """Hold the lock of this user's only keeper; BusyError names the process that has it."""
    try:
        with hold_lock(_lock_path(places), "labctl keep", wait_s=2.0):
            yield
    except BusyError as error:
        if not error.holder:
            raise
        raise BusyError(
            "labctl keep is already running here",
            why=error.holder,
            hint="labctl keep --list",
        ) from None


def is_running(places: Paths) -> bool:
    """Tell whether a keeper of this user is running here."""
    if not _lock_path(places).exists():
        return False
    try:
        with hold_lock(_lock_path(places), "checking whether labctl keep runs", wait_s=0.0):
            return False
    except BusyError:
        return True


def _lock_path(places: Paths) -> Path:
    return places.keep_dir / ".locks" / "keep"


class Keeper:
    """The keeper's loop, once per process. `run` returns once `stop` is set."""

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
        self._ground = ground or self._build_context
        self._changed_at: dict[str, int] = {}
        self._begun = False
        self._due: dict[str, float] = {}
        self._disks_due: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._busy: set[str] = set()
        self._guard = threading.Lock()

    def run(self) -> None:
        """Check the labs until `stop` is set. Checks that have started may outlast this call."""
        rounds = kept_labs.read_rounds(self._places)
        self.rounds = {name: last for name, last in rounds.items() if last.state == SWEPT}
        while not self.stop.is_set():
            self.tick()
            self.stop.wait(TICK_S)

    def due_now(self) -> None:
        """Make every kept lab due for a check at the next `tick`."""
        with self._guard:
            self._due.clear()

    def tick(self) -> list[threading.Thread]:
        """Start a check of each kept lab that is due; return the new threads."""
        threads = []
        self._update_kept_labs()
        now = time.monotonic()
        for name in sorted(self._changed_at):
            with self._guard:
                if name in self._busy or self._due.get(name, 0.0) > now:
                    continue
                if len(self._busy) >= AT_ONCE:
                    break
                self._busy.add(name)
            thread = threading.Thread(target=self._run_check, args=(name,), daemon=True)
            thread.start()
            threads.append(thread)
        return threads

    def _update_kept_labs(self) -> None:
        """Update the list of kept labs. New and changed ones are due at once."""
        changed_at = {}
        for path in self._places.keep_dir.glob(f"[!.]*/{kept_labs.RECORD}"):
            try:
                changed_at[path.parent.name] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
        for name in self._changed_at.keys() - changed_at.keys():
            self._tell(name, "is no longer kept")
            self.rounds.pop(name, None)
        for name, time_ns in changed_at.items():
            if self._changed_at.get(name) != time_ns:
                self._due[name] = 0.0
                if self._begun:
                    self._tell(name, "was handed over")
        self._begun = True
        if self._changed_at != changed_at:
            self._changed_at = changed_at
            self._write_rounds()

    def _run_check(self, name: str) -> None:
        try:
            with kept_labs.worked_on(self._places, name, "a check by labctl keep"):
                result = self._check_lab(name)
        except (BusyError, NotFoundError) as error:
            result = Round(at=time.time(), state=TROUBLE, error=error.what, hint=error.hint)
        except LabError as error:
            result = Round(at=time.time(), state=TROUBLE, error=_error_text(error), hint=error.hint)
        self._record_check(name, result)

    def _record_check(self, name: str, result: Round) -> None:
        before = self.rounds.get(name)
        pause_s = self._next_pause_s(name, result) * random.uniform(0.8, 1.2)
        if result.error and (before is None or before.error != result.error):
            hint = f"; next: {result.hint}" if result.hint else ""
            self._tell(name, f"{result.error}{hint}; tried again in {pause_s:.0f} s")
        if not result.error and before is not None and before.error:
            self._tell(name, "working again")
        with self._guard:
            next_at = time.time() + pause_s
            if name in self._changed_at:
                self.rounds[name] = msgspec.structs.replace(result, next_at=next_at)
            self._due[name] = time.monotonic() + pause_s
            self._busy.discard(name)
        self._write_rounds()

    def _next_pause_s(self, name: str, result: Round) -> float:
        """Return the seconds until the next check: after errors, checks become less frequent."""
        if result.state == TROUBLE:
            before = self._pauses.get(name, self._every_s / 2)
            self._pauses[name] = min(2 * before, LONGEST_PAUSE_S)
            return self._pauses[name]
        self._pauses.pop(name, None)
        return {WELL: self._every_s, ENDED: ENDED_EVERY_S}.get(result.state, SWEPT_EVERY_S)

    def _check_lab(self, name: str) -> Round:
        kept_lab = kept_labs.ward(self._places, name)
        ground = self._ground(kept_lab)
        before = _describe_states(ground, kept_lab)
        state = look(ground, kept_lab, swept=self._was_swept(name))
        if state == TROUBLE:
            if _open_runs(ground, kept_lab):
                self._tell(name, "its server does not answer, or has lost a run: starting recovery")
            self._attend(name)
            all_over = not _open_runs(ground, kept_lab)
            has_no_server = ground.state.server_of_lab(ground.lab_id) is None
            state = SWEPT if all_over and has_no_server else ENDED if all_over else WELL
        elif self._has_expired(name, ground):
            self._attend(name)
        for run_id, text in _describe_states(ground, kept_lab).items():
            if before.get(run_id) != text:
                self._tell(name, f"{run_id}: {text}")
        return Round(at=time.time(), state=state)

    def _has_expired(self, name: str, ground: Ground) -> bool:
        """Tell whether a kept disk has expired; checked once an hour."""
        now = time.monotonic()
        if now < self._disks_due.get(name, 0.0):
            return False
        self._disks_due[name] = now + SWEPT_EVERY_S
        provider = ground.config.server.provider
        return has_expired(ground.state, ground.lab_id, provider)

    def _was_swept(self, name: str) -> bool:
        before = self.rounds.get(name)
        return before is not None and before.state == SWEPT

    def _build_context(self, kept_lab: Ward) -> Ground:
        # What every check notices is not an event.
        return kept_labs.ground(
            kept_lab, self._places, self._state, Silent(), self._environ, record_only=True
        )

    def _write_rounds(self) -> None:
        with self._guard:
            kept_labs.write_rounds(self._places, self.rounds)


def look(ground: Ground, kept_lab: Ward, *, swept: bool = False) -> str:
    """Check a kept lab cheaply: WELL, ENDED (nothing runs), SWEPT, or TROUBLE (needs a worker).

    Without a store, the outputs of its runs are downloaded: a recovery continues from them.
    """
    server = ground.state.server_of_lab(ground.lab_id)
    if server is None:
        disks = list_kept_disks(ground.state, ground.lab_id)
        return SWEPT if swept and not disks and not _open_runs(ground, kept_lab) else TROUBLE
    try:
        reply = runs.refresh(ground, server)
        on_server = {run["id"] for run in reply["runs"]}
        if any(run_id not in on_server for run_id in _open_runs(ground, kept_lab)):
            return TROUBLE
        if any(
            run.state == "lost" and not run.stopped_by for run in _recorded_runs(ground, kept_lab)
        ):
            return TROUBLE
    except LabError:
        # `attend` finds out whether it is the server, the connection or something temporary.
        return TROUBLE
    if not ground.config.store:
        _pull_outputs(ground, kept_lab, on_server)
    return WELL if _open_runs(ground, kept_lab) else ENDED


def _pull_outputs(ground: Ground, kept_lab: Ward, on_server: set[str]) -> None:
    """Download the outputs of runs that are active, or have ended since the last check."""
    run_ids = [
        run_id
        for run_id in kept_lab.runs
        if run_id in on_server and not _is_complete(ground, run_id)
    ]
    for run_id in run_ids:
        (pulled,) = outputs.pull(ground, ground.server(), [run_id])
        run = ground.state.run(ground.lab_id, run_id)
        if pulled.complete and run is not None and kept_labs.is_over(run):
            _complete_mark(ground, run_id).touch()


def _complete_mark(ground: Ground, run_id: str) -> Path:
    return ground.config.root / ".labctl" / f"whole-{run_id}"


def _is_complete(ground: Ground, run_id: str) -> bool:
    return _complete_mark(ground, run_id).exists()


def _recorded_runs(ground: Ground, kept_lab: Ward) -> list[Run]:
    return kept_labs.known_runs(ground.state, kept_lab)


def _open_runs(ground: Ground, kept_lab: Ward) -> list[str]:
    """List the runs that are not over."""
    over = {run.id for run in _recorded_runs(ground, kept_lab) if kept_labs.is_over(run)}
    return [run_id for run_id in kept_lab.runs if run_id not in over]


def _describe_states(ground: Ground, kept_lab: Ward) -> dict[str, str]:
    return {
        run.id: run.told or f"{run.state} on {run.server_id}"
        for run in _recorded_runs(ground, kept_lab)
    }


def _error_text(error: LabError) -> str:
    return ": ".join(filter(None, [error.what, error.why.replace("\n", "; ")]))


def listed(places: Paths, state: State) -> list[dict[str, Any]]:
    """Describe every kept lab with its runs and the keeper's last check."""
    rounds = kept_labs.read_rounds(places)
    return [
        {
            "name": kept_lab.name,
            "lab": kept_lab.lab,
            "lab_id": kept_lab.lab_id,
            "by": kept_lab.by,
            "at": kept_lab.at,
            "spent_usd": kept_lab.spent_usd,
            "server": state.server_of_lab(kept_lab.lab_id),
            "runs": [state.run(kept_lab.lab_id, run_id) or run_id for run_id in kept_lab.runs],
            "round": rounds.get(kept_lab.name),
        }
        for kept_lab in kept_labs.wards(places)
    ]

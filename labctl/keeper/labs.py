"""`labctl keep`: checks every lab that was handed over, and has the one in trouble recovered.

A check of a quiet lab is one ssh command. A recovery (`recover_lab`) runs in a process of its own,
so that this process stays small and can end at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from labctl.config import Paths
from labctl.config.member_ids import list_lab_ids
from labctl.errors import BusyError, LabError
from labctl.events import AGREE_TO_PRICES, Event, Note, PolicyReporter, SilentReporter, Step
from labctl.keeper.scheduler import Report, Scheduler, Task, hold_alone
from labctl.lazy import lazy_imports
from labctl.lifecycle import kept_labs
from labctl.lifecycle.kept_labs import KeeperCheck, KeptLab
from labctl.model import Run, Server, Value
from labctl.runs import outputs, runs
from labctl.servers.context import LabContext
from labctl.state import State
from labctl.state.disks import has_expired, list_kept_disks
from labctl.state.locks import hold_lock

with lazy_imports(__name__):
    # Few labs have several servers, and this process stays small.
    from labctl.lifecycle import gang, gang_outcome, gang_runs, gang_stall

EVERY_S = 15.0
ENDED_EVERY_S = 60.0
SWEPT_EVERY_S = 3600.0
LONGEST_PAUSE_S = 300.0
AT_ONCE = 12
WELL, ENDED, SWEPT, TROUBLE = "well", "ended", "swept", "trouble"
# Recovers a kept lab; LabError if that fails now.
Attend = Callable[[str], None]


def make_log_reporter(notify: Report, name: str) -> PolicyReporter:
    """Return a reporter that writes the keeper's log. It agrees to prices: kept labs limit them."""

    def show(event: Event) -> None:
        if isinstance(event, Note) and event.level != "detail":
            notify(name, event.text)
        elif isinstance(event, Step) and not event.brief:
            detail = f" ({event.detail})" if event.detail else ""
            notify(name, f"{event.name}: done{detail}" if event.done else event.name)

    return PolicyReporter(show, AGREE_TO_PRICES)


def only_keeper(places: Paths) -> AbstractContextManager[None]:
    """Hold the lock of this user's only keeper; BusyError names the process that has it."""
    return hold_alone(
        _lock_path(places),
        "labctl keep",
        already="labctl keep is already running here",
        hint="labctl keep --list",
    )


def is_running(places: Paths) -> bool:
    """Tell whether a keeper of this user is running here."""
    if not _lock_path(places).exists():
        return False
    try:
        what = "checking whether labctl keep runs"
        with hold_lock(_lock_path(places), what, wait_s=0.0, is_command=False):
            return False
    except BusyError:
        return True


def _lock_path(places: Paths) -> Path:
    return places.keep_dir / ".locks" / "keep"


class Keeper:
    """The keeper of labs, once per process. `run` returns once `stop` is set."""

    def __init__(
        self,
        places: Paths,
        state: State,
        environ: Mapping[str, str],
        *,
        notify: Report,
        attend: Attend,
        context: Callable[[KeptLab], LabContext] | None = None,
    ) -> None:
        self.checks: dict[str, KeeperCheck] = {}
        self._scheduler = Scheduler(notify, at_once=AT_ONCE, on_done=self._note)
        self.stop = self._scheduler.stop
        self._places, self._state, self._environ = places, state, environ
        self._notify, self._attend = notify, attend
        self._context = context or self._build_context
        # The labs in its care, by name: when each was handed over, as its record's time of change.
        self._handed_over: dict[str, int] = {}
        self._begun = False
        self._disks_due: dict[str, float] = {}
        self._states: dict[str, str] = {}
        self._guard = threading.Lock()

    def run(self) -> None:
        """Check labs until `stop`. A check that is running may still go on when this returns."""
        checks = kept_labs.read_checks(self._places)
        self.checks = {name: last for name, last in checks.items() if last.state == SWEPT}
        self._scheduler.run(before_tick=self._update_tasks)

    def make_all_due(self) -> None:
        """Have every lab checked by the next `tick`, whenever its turn would be."""
        self._scheduler.make_all_due()

    def tick(self) -> list[threading.Thread]:
        """Start a check of each lab that is due; the threads that run them."""
        self._update_tasks()
        return self._scheduler.start_due_tasks()

    def _update_tasks(self) -> None:
        """Update the list of kept labs. New and changed ones are due at once."""
        labs = {}
        for path in self._places.keep_dir.glob(f"[!.]*/{kept_labs.RECORD}"):
            try:
                labs[path.parent.name] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
        for name in self._handed_over.keys() - labs.keys():
            self._notify(name, "is no longer kept")
            self._scheduler.remove(name)
            self.checks.pop(name, None)
        for name, changed in labs.items():
            if self._handed_over.get(name) != changed:
                check = partial(self._check, name)
                self._scheduler.add(Task(name, check, EVERY_S, LONGEST_PAUSE_S))
                if self._begun:
                    self._notify(name, "was handed over")
        self._begun = True
        if self._handed_over != labs:
            self._handed_over = labs
            self._write_checks()

    def _check(self, name: str) -> float:
        """Check one lab, and return the seconds until the next time."""
        with kept_labs.lock_kept_lab(self._places, name, "keep"):
            state = self._check_lab(name)
        self._states[name] = state
        return {WELL: EVERY_S, ENDED: ENDED_EVERY_S}.get(state, SWEPT_EVERY_S)

    def _check_lab(self, name: str) -> str:
        kept_lab = kept_labs.find_kept_lab(self._places, name)
        context = self._context(kept_lab)
        before = _describe_states(context, kept_lab)
        state = check_lab(context, kept_lab, swept=self._is_swept(name))
        if state == TROUBLE:
            if kept_labs.list_open_runs(context, kept_lab):
                self._notify(name, _describe_trouble(context))
            self._attend(name)
            all_over = not kept_labs.list_open_runs(context, kept_lab)
            state = (
                SWEPT if all_over and not _list_servers(context) else ENDED if all_over else WELL
            )
        elif self._has_expired(name, context):
            self._attend(name)
        for run_id, text in _describe_states(context, kept_lab).items():
            if before.get(run_id) != text:
                self._notify(name, f"{run_id}: {text}")
        return state

    def _note(self, task: Task, error: LabError | None, pause_s: float) -> None:
        """Keep what the check has found, for `labctl keep --list` and for the next keeper."""
        now = time.time()
        last = KeeperCheck(
            at=now,
            next_at=now + pause_s,
            state=TROUBLE if error else self._states[task.name],
            error=task.error,
            hint=error.hint if error else "",
        )
        with self._guard:
            if task.name in self._handed_over:
                self.checks[task.name] = last
        self._write_checks()

    def _has_expired(self, name: str, context: LabContext) -> bool:
        """Tell whether a kept disk has expired; checked once an hour."""
        now = time.monotonic()
        if now < self._disks_due.get(name, 0.0):
            return False
        self._disks_due[name] = now + SWEPT_EVERY_S
        provider = context.config.server.provider
        members = kept_labs.build_members(context)
        return any(has_expired(context.state, one.lab_id, provider) for one in members)

    def _is_swept(self, name: str) -> bool:
        before = self.checks.get(name)
        return before is not None and before.state == SWEPT

    def _build_context(self, kept_lab: KeptLab) -> LabContext:
        # What every check notices is not an event.
        return kept_labs.make_context(
            kept_lab, self._places, self._state, SilentReporter(), self._environ, record_only=True
        )

    def _write_checks(self) -> None:
        with self._guard:
            kept_labs.write_checks(self._places, self.checks)


def check_lab(context: LabContext, kept_lab: KeptLab, *, swept: bool = False) -> str:
    """Check a kept lab cheaply: WELL, ENDED (nothing runs), SWEPT, or TROUBLE (needs a worker).

    Without a store, the outputs of its runs are downloaded: a recovery continues from them.
    """
    members = kept_labs.build_members(context)
    if not _list_servers(context):
        disks = [disk for one in members for disk in list_kept_disks(context.state, one.lab_id)]
        return (
            SWEPT
            if swept and not disks and not kept_labs.list_open_runs(context, kept_lab)
            else TROUBLE
        )
    try:
        on_servers = [_refresh_runs(one) for one in members]
    except LabError:
        # The recovery finds out whether it is the server, the connection or something temporary.
        return TROUBLE
    open_runs = kept_labs.list_open_runs(context, kept_lab)
    if any(_needs_recovery(members, on_servers, run_id) for run_id in open_runs):
        return TROUBLE
    for run_id in kept_lab.runs:
        if len(members) > 1 and run_id not in open_runs:
            _end_remaining_parts(members, run_id)
    if not context.config.store:
        _pull_outputs(members[0], kept_lab, on_servers[0])
    return WELL if kept_labs.list_open_runs(context, kept_lab) else ENDED


def _refresh_runs(context: LabContext) -> set[str]:
    """Record the runs of one server of the lab, and return their ids; none without a server."""
    server = context.state.get_lab_server(context.lab_id)
    return {run.id for run in runs.refresh(context, server).runs} if server else set()


def _needs_recovery(
    members: Sequence[LabContext], on_servers: Sequence[set[str]], run_id: str
) -> bool:
    """Whether a server lacks its part of a run that is not over, or that part has failed or hangs.

    A part may also wait for the others, since the worker that started them again was interrupted.
    """
    count = gang_runs.count_parts(members[0], run_id) if len(members) > 1 else 1
    if count > 1 and gang_outcome.find_unfinished_restart(members[0], run_id):
        return True
    for one, run_ids in zip(members[:count], on_servers, strict=False):
        part = one.state.get_run(one.lab_id, run_id)
        if run_id not in run_ids or part is None or (part.has_ended and part.exit_code != 0):
            return True
    stall_s = members[0].config.launch.stall_s
    return count > 1 and gang_stall.is_stalled(members[:count], run_id, stall_s)


def _end_remaining_parts(members: Sequence[LabContext], run_id: str) -> None:
    """End the other parts of a run of which a limit has stopped one; they would wait for it.

    A cancel ends all of them itself, after as long as its user lets them save.
    """
    if gang_runs.is_canceled_since(members[0], run_id, 0.0):
        return
    parts = [one.state.get_run(one.lab_id, run_id) for one in members]
    known = [part for part in parts if part is not None]
    stopped = next((part for part in known if part.stopped_by), None)
    if stopped and any(part.state in ("starting", "running") for part in known):
        gang_runs.end_parts(members, run_id, f"{stopped.stopped_by} ended {stopped.server_id}")


def _pull_outputs(context: LabContext, kept_lab: KeptLab, on_server: set[str]) -> None:
    """Download the outputs of runs that are active, or have ended since the last check."""
    run_ids = [
        run_id
        for run_id in kept_lab.runs
        if run_id in on_server and not _is_complete(context, run_id)
    ]
    for run_id in run_ids:
        (pulled,) = outputs.pull(context, context.get_server(), [run_id])
        if pulled.complete and kept_labs.is_over(context, run_id):
            _complete_mark(context, run_id).touch()


def _complete_mark(context: LabContext, run_id: str) -> Path:
    return context.config.root / ".labctl" / f"whole-{run_id}"


def _is_complete(context: LabContext, run_id: str) -> bool:
    return _complete_mark(context, run_id).exists()


def _recorded_runs(context: LabContext, kept_lab: KeptLab) -> list[Run]:
    return kept_labs.list_recorded_runs(context.state, kept_lab)


def _list_servers(context: LabContext) -> list[Server]:
    members = kept_labs.build_members(context)
    servers = [context.state.get_lab_server(one.lab_id) for one in members]
    return [server for server in servers if server is not None]


def _describe_trouble(context: LabContext) -> str:
    if gang.has_several_servers(context):
        return "a server does not answer, or a part of a run has failed or hangs: starting recovery"
    return "its server does not answer, or has lost a run: starting recovery"


def _describe_states(context: LabContext, kept_lab: KeptLab) -> dict[str, str]:
    return {
        run.id: run.summary or f"{run.state_text} on {run.server_id}"
        for run in _recorded_runs(context, kept_lab)
    }


class KeptLabStatus(Value, frozen=True):
    """A kept lab with its server, its runs (an id without a record) and the last check of it.

    `servers` are all of its servers, the first one first.
    """

    name: str
    lab: str
    lab_id: str
    by: str
    at: float
    spent_usd: float
    server: Server | None
    servers: tuple[Server, ...]
    runs: tuple[Run | str, ...]
    round: KeeperCheck | None


def describe_kept_labs(places: Paths, state: State) -> list[KeptLabStatus]:
    """Describe every kept lab with its runs and the keeper's last check."""
    checks = kept_labs.read_checks(places)
    return [
        KeptLabStatus(
            name=kept_lab.name,
            lab=kept_lab.lab,
            lab_id=kept_lab.lab_id,
            by=kept_lab.by,
            at=kept_lab.at,
            spent_usd=kept_lab.spent_usd,
            server=state.get_lab_server(kept_lab.lab_id),
            servers=tuple(
                server
                for lab_id in list_lab_ids(kept_lab.lab_id)
                if (server := state.get_lab_server(lab_id)) is not None
            ),
            runs=tuple(
                state.get_run(kept_lab.lab_id, run_id) or run_id for run_id in kept_lab.runs
            ),
            round=checks.get(kept_lab.name),
        )
        for kept_lab in kept_labs.list_kept_labs(places)
    ]

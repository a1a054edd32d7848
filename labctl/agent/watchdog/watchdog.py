"""The watchdog: ends the server at its deadline, at its budget, or when nobody works on it.

`python3 PROGRAM watchdog DIRECTORY` runs until the end. One loop reads the clocks and never blocks:
the search for activity and the wind-down run in threads of their own. The state is written at every
tick, so that the next watchdog continues after a crash or a reboot.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from ...wire.text import dollars_text, duration_text
from ...wire.verbs import Empty
from ...wire.watchdog import ElapsedTimeRecord, StateRecord, UnsavedCountRecord, WatchRecord
from ..host.paths import read_boottime_s, read_record
from ..program import PROGRAM
from .activity import ActivityReader, ActivitySnapshot, ActivityWatcher
from .boot_timer import is_armed, update_timer
from .decisions import (
    RATE_BYTES_S,
    WatchdogDecision,
    carry_elapsed_s,
    decide,
    estimate_wind_down_s,
    limits_text,
    list_clocks,
    should_restart_ttl,
)
from .limits import LimitsFile
from .mirroring import INTERVAL_S, Mirror
from .mirroring import MirrorRequest as Mirrored
from .notice_services import open_notice_service
from .notify import list_run_logs, notify
from .poweroff import WindDown
from .reclaim import ReclaimHandler
from .recorder import Recorder
from .saved_results import estimate_unsaved
from .shutdown import ShutdownPlan, find_unsavable, list_live_runs
from .state_files import FRESH_S, Lock, read_boot_id, read_limits, record_decision, write_state
from .wakeup import WakeupSocket, wake_watchdog

# seconds between ticks: usually, and in the last LAST_S before an end
TICK_S, LAST_TICK_S = 5.0, 1.0
LAST_S = 90.0
ESTIMATE_EVERY_S = 60.0
# seconds before an idle server that stays on for its unsaved results is checked again
STAY_S = 600.0
# seconds after a boot to raise a spent budget, or to pull, before the server ends again
AFTER_BOOT_S = 60.0
MOST_WIND_DOWN_S = 2 * 3600.0
SHOWN_S = PAUSE_S = 60.0


class Watchdog:
    """The watchdog of one server."""

    def __init__(self, directory: Path, version: str) -> None:
        self.directory = directory
        self.version = version
        self.limits_file = LimitsFile(directory)
        self.state = read_state(directory)
        self.boot = read_boot_id()
        self.activity_watcher: ActivityWatcher | None = None
        self.ending: WindDown | None = None
        self.last_work_s = read_boottime_s()
        self.was_busy: bool | None = None
        self.unsaved = (0, 0)
        self.cannot: list[str] | None = None
        self.explore_now = threading.Event()
        self.stay_until_s = 0.0
        self.not_before_s = 0.0
        self.idle_due_s = 0.0
        self.rate_bytes_s = self.state.rate_bytes_s or RATE_BYTES_S
        self.bell = WakeupSocket(directory)
        self.reclaims = ReclaimHandler(directory, self.record_decision)
        self.mirror = Mirror(self.record_decision)

    def run(self) -> None:
        """Run until the server is released or powered off."""
        self._resume()
        while True:
            self._reload()
            decision = self._tick()
            if self.ending is not None and self.ending.released:
                return
            left_s = decision.ends_in_s
            is_near = left_s is not None and left_s < LAST_S
            wait_s = LAST_TICK_S if is_near or self.ending else TICK_S
            if left_s is not None and not self.ending:
                wait_s = max(0.05, min(wait_s, left_s))
            self.bell.wait(wait_s)

    # State

    def _resume(self) -> None:
        self.limits_file.reload()
        if self.state.server_id != self.limits_file.record.server_id:
            self.state = StateRecord()
        if self.state.age:
            self._carry_on(self.state.age)
        self._take_limits()
        self.activity_watcher = ActivityWatcher(
            ActivityReader(self.limits_file.plan.account), lambda: wake_watchdog(self.directory)
        )
        self.activity_watcher.set_idle_limit(self.limits_file.limits.idle_s)
        threading.Thread(target=self._explore, daemon=True).start()
        self.reclaims.listen(open_notice_service(self.limits_file.record.notices))
        Recorder(lambda: self.limits_file.plan.account, self.record_decision)

    def _carry_on(self, age: ElapsedTimeRecord) -> None:
        """Restore elapsed and idle time. A reboot counts as work, time without a watchdog does not.

        After a reboot, a ttl that has ended starts again.
        """
        rebooted = age.boot != self.boot
        elapsed = carry_elapsed_s(age, self.boot, read_boottime_s(), time.time())
        why = f"the server's age is {duration_text(elapsed)}"
        self.record_decision(
            "watchdog restarted" + (" after a reboot" if rebooted else ""), why, elapsed
        )
        ended = self.state.ended
        self.state = self.state._replace(ending="", ended="")
        if not rebooted:
            self.last_work_s -= self.state.idle_for_s
            return
        self.not_before_s = read_boottime_s() + AFTER_BOOT_S
        if should_restart_ttl(self.limits_file.limits, elapsed, ended == "ttl"):
            self._begin_anew(elapsed)

    def _begin_anew(self, elapsed: float) -> None:
        self.limits_file.restart_ttl(elapsed)
        self.state = self.state._replace(warned=None)
        self.record_decision(
            "ttl restarted", "the server was off at its deadline and is now in use again"
        )

    def _reload(self) -> None:
        if self.limits_file.reload():
            if self.state.server_id not in ("", self.limits_file.record.server_id):
                self.state, self.last_work_s = StateRecord(), read_boottime_s()
            self._take_limits()
            self.last_work_s = read_boottime_s()  # a person changed the limits
            if self.activity_watcher:
                self.activity_watcher.set_idle_limit(self.limits_file.limits.idle_s)
                self.activity_watcher.request_update()
            self.cannot = None
            self.explore_now.set()
            self.stay_until_s = self.not_before_s = 0.0

    def _take_limits(self) -> None:
        """Apply the limits. Of the recorded ages of the server, the highest counts."""
        now, wall = read_boottime_s(), time.time()
        record = self.limits_file.record
        elapsed = carry_elapsed_s(record.age, self.boot, now, wall)
        if self.state.age:
            elapsed = max(elapsed, carry_elapsed_s(self.state.age, self.boot, now, wall))
        self._remember(elapsed)
        if self.state.edition != record.edition:
            self.state = self.state._replace(edition=record.edition)
            self.record_decision("limits", limits_text(self.limits_file.limits))

    def _remember(self, elapsed_s: float) -> None:
        self.state = self.state._replace(
            server_id=self.limits_file.record.server_id,
            boot=self.boot,
            boottime_s=read_boottime_s(),
            wall_s=time.time(),
            elapsed_s=elapsed_s,
            rate_bytes_s=self.rate_bytes_s,
        )

    def elapsed_s(self) -> float:
        age = self.state.age or self.limits_file.record.age
        return carry_elapsed_s(age, self.boot, read_boottime_s(), time.time())

    def record_decision(self, what: str, why: str, elapsed_s: float | None = None) -> None:
        """Record a decision with its reason."""
        record_decision(
            self.directory, self.elapsed_s() if elapsed_s is None else elapsed_s, what, why
        )

    def _explore(self) -> None:
        """Find what could not be saved at the end, and what is not saved yet: slow, in a thread."""
        checked: tuple[str, str] | None = None
        problems: list[str] = []
        while True:
            plan = self.limits_file.plan
            # Somebody may have repaired a problem, for example created the store's bucket.
            if problems or self.cannot is None or (plan.store, plan.disk) != checked:
                checked, problems = (plan.store, plan.disk), self._find_problems(plan, problems)
                if problems != self.cannot:
                    self.cannot = problems
                    wake_watchdog(self.directory)
            with suppress(OSError, ValueError):
                self.unsaved = estimate_unsaved(plan.lab_id, plan.every_lab)
            self.explore_now.wait(ESTIMATE_EVERY_S)
            self.explore_now.clear()

    def _find_problems(self, plan: ShutdownPlan, previous: list[str]) -> list[str]:
        """Test what could not be saved at the end, and record what has changed since."""
        problems = find_unsavable(plan)
        for problem in problems:
            if problem not in previous:
                self.record_decision("results at risk", problem)
        if previous and not problems:
            self.record_decision("results safe", "they can be saved at the end")
        return problems

    # Decisions

    def _tick(self) -> WatchdogDecision:
        now = read_boottime_s()
        snapshot = self.activity_watcher.latest if self.activity_watcher else None
        idle_for = self._idle_for(snapshot, now)
        elapsed = self.elapsed_s()
        plan = self.limits_file.plan
        runs = snapshot.runs if snapshot else frozenset()
        self._update_mirror(plan, runs)
        early = estimate_wind_down_s(
            plan.grace_s if runs else 0.0,
            self.unsaved[1],
            self.rate_bytes_s,
            bool(plan.store or plan.saver_s),
            plan.saver_s,
        )
        warned = self.state.warned or {}
        decision = decide(self.limits_file.limits, elapsed, idle_for, early, warned)
        self.state = self.state._replace(warned=decision.warned)
        self._count_idle(idle_for, elapsed)
        if self.ending is not None:
            self._continue_end(self.ending, elapsed)
        elif self.reclaims.act_on_notices(plan, self.unsaved[1], self.rate_bytes_s):
            pass  # its provider ends it
        elif decision.end and self._is_confirmed(decision, snapshot, now):
            self._begin_end(decision, elapsed, idle_for)
        elif decision.warn_s is not None:
            self._warn(decision)
        # A person who has started a server whose budget is spent may still raise it.
        waits = self.ending is not None or now < self.not_before_s
        update_timer(self.boot, self.limits_file.limits, elapsed, waits=waits)
        self._remember(elapsed)
        write_state(self.directory, "state.json", self.state)
        self._write_status(decision, snapshot, elapsed, idle_for)
        return decision

    def _update_mirror(self, plan: ShutdownPlan, runs: frozenset[str]) -> None:
        """Update the mirror, except during the end, which has a pass of its own."""
        if plan.store and self.ending is None:
            every_s = self.limits_file.record.mirror_s or INTERVAL_S
            self.mirror.update(Mirrored(plan.account, plan.lab_id, plan.every_lab, every_s, runs))

    def _count_idle(self, idle_for: float, elapsed: float) -> None:
        """Add up idle time, which the cost report shows. Pauses up to PAUSE_S do not count."""
        since = max(0.0, elapsed - (self.state.counted_s or elapsed))
        total_s = self.state.idle_total_s + (since if idle_for > PAUSE_S else 0.0)
        self.state = self.state._replace(
            idle_total_s=total_s, counted_s=elapsed, idle_for_s=idle_for
        )

    def _idle_for(self, snapshot: ActivitySnapshot | None, now: float) -> float:
        """Return the seconds since the last activity; 0 during activity or if it is unknown."""
        if snapshot is None:
            return max(0.0, now - self.last_work_s)
        if now - snapshot.began_s > FRESH_S:
            self._note_activity(True, "activity cannot be read (it takes too long)")
            self.last_work_s = now
            return 0.0
        if snapshot.busy:
            self._note_activity(True, snapshot.busy[0])
            self.last_work_s = now
            return 0.0
        self._note_activity(False, "no activity")
        self.last_work_s = max(self.last_work_s, snapshot.began_s - snapshot.quiet_s)
        return max(0.0, now - self.last_work_s)

    def _note_activity(self, busy: bool, why: str) -> None:
        if busy != self.was_busy:
            self.was_busy = busy
            self.record_decision("busy" if busy else "idle", why)

    def _is_confirmed(
        self, decision: WatchdogDecision, snapshot: ActivitySnapshot | None, now: float
    ) -> bool:
        """Return whether to end now: idleness must be confirmed by a check after the due time."""
        if now < self.not_before_s:
            return False
        if decision.ends_by != "idle":
            return True
        if now < self.stay_until_s:
            return False
        if not self.idle_due_s or decision.ends_in_s is None:
            self.idle_due_s = now
        if snapshot is not None and snapshot.began_s >= self.idle_due_s:
            return True
        if self.activity_watcher:
            self.activity_watcher.request_update()
        return False

    def _warn(self, decision: WatchdogDecision) -> None:
        self.idle_due_s = 0.0
        left = duration_text(decision.warn_s or 0.0)
        why = self._reason(decision.ends_by)
        text = f"this server ends in {left}: {why}."
        if self.limits_file.plan.disk == "goes" or self.cannot:
            text += " Results that exist only here are then lost. To save them: labctl pull."
        elif self.limits_file.plan.saver_s and decision.ends_by != "idle":
            text += " The course's keeper saves the results first."
        if decision.ends_by != "budget":
            text += " For more time: labctl extend 30m."
        self.record_decision(f"warned {left} before the end", why)
        threading.Thread(target=self._notify, args=(text,), daemon=True).start()

    def _notify(self, text: str) -> None:
        """Notify people. Slow, since it asks the engine for live runs: call it in a thread."""
        plan = self.limits_file.plan
        notify(plan.account, text, list_run_logs(list_live_runs(plan)))

    def _reason(self, by: str) -> str:
        limits = self.limits_file.limits
        if by == "idle":
            return f"nobody has worked on it (limit {duration_text(limits.idle_s or 0)})"
        if by == "budget":
            return f"its budget of {dollars_text(limits.budget_usd or 0)} is spent"
        return f"its time is up ({duration_text((limits.deadline_s or 0) - limits.from_s)})"

    # The end

    def _begin_end(self, decision: WatchdogDecision, elapsed: float, idle_for: float) -> None:
        by = decision.ends_by
        self.idle_due_s = 0.0
        limit = list_clocks(self.limits_file.limits, elapsed, idle_for, 0.0)[by]
        self.record_decision(f"ending ({by})", self._reason(by))
        self.state = self.state._replace(ending=by)
        text = f"this server ends now: {self._reason(by)}."
        threading.Thread(target=self._notify, args=(text,), daemon=True).start()
        self.ending = WindDown(
            self.limits_file.plan, by, elapsed, elapsed + limit.left_s, self.record_decision
        )

    def _continue_end(self, ending: WindDown, elapsed: float) -> None:
        """Continue a wind-down, which may take up to MOST_WIND_DOWN_S."""
        outcome = ending.outcome
        if outcome is not None and not outcome.end:
            self.ending, self.stay_until_s = None, read_boottime_s() + STAY_S
            self.state = self.state._replace(ending="")
            return
        if outcome is None and elapsed - ending.began_s < MOST_WIND_DOWN_S:
            return
        if outcome is None:
            self.record_decision(
                "wind-down aborted", f"it took longer than {duration_text(MOST_WIND_DOWN_S)}"
            )
        elif outcome.rate_bytes_s:
            self.rate_bytes_s = outcome.rate_bytes_s
        if not ending.attempts:
            overrun_s = ending.report_overrun_s(elapsed)
            self.state = self.state._replace(overrun_s=overrun_s, ended=ending.by)
            self._remember(elapsed)
            write_state(self.directory, "state.json", self.state)
        ending.finish()

    def _write_status(
        self,
        decision: WatchdogDecision,
        snapshot: ActivitySnapshot | None,
        elapsed: float,
        idle_for: float,
    ) -> None:
        """Write status.json, which the verbs `watch` and `status` show."""
        limits = self.limits_file.limits
        running = list_clocks(limits, elapsed, idle_for, 0.0)
        left = {name: round(clock.left_s, 1) for name, clock in running.items()}
        recent = [s for s in (snapshot.signs if snapshot else []) if s.age_s < SHOWN_S]
        status = WatchRecord(
            server_id=self.limits_file.record.server_id,
            lab_id=self.limits_file.record.lab_id,
            version=self.version,
            edition=self.limits_file.record.edition,
            boot=self.boot,
            boottime_s=read_boottime_s(),
            elapsed_s=round(elapsed, 1),
            ttl_left_s=left.get("ttl"),
            budget_left_s=left.get("budget"),
            idle_for_s=round(idle_for, 1),
            idle_left_s=left.get("idle", limits.idle_s),
            ends_in_s=None if decision.ends_in_s is None else round(decision.ends_in_s, 1),
            ends_by=decision.ends_by,
            idle_total_s=round(self.state.idle_total_s, 1),
            spent_usd=round(elapsed / 3600 * limits.price_usd_per_hour, 4),
            busy=tuple(
                f"{s.text}, {duration_text(s.age_s)} ago" if s.age_s else s.text for s in recent
            ),
            gpu_percent=snapshot.gpu_percent if snapshot else None,
            timer=is_armed(),
            cannot=None if self.cannot is None else tuple(self.cannot),
            unsaved=UnsavedCountRecord(*self.unsaved),
            ending=self.state.ending,
            overrun_s=self.state.overrun_s,
            reclaim=self.reclaims.shown,
            mirror=self.mirror.shown,
            pid=os.getpid(),
        )
        write_state(self.directory, "status.json", status)


def read_state(directory: Path) -> StateRecord:
    """Return the state of the last watchdog; an empty one if there was none."""
    return read_record(StateRecord, directory / "state.json") or StateRecord()


def run(request: Empty) -> None:
    """Run the watchdog of the directory `sys.argv[2]` (verb `watchdog`).

    A second one ends at once.
    """
    directory = Path(sys.argv[2])
    lock = Lock(directory)
    if not lock.take():
        return
    limits = read_limits(directory)
    if limits is None or read_state(directory).released == limits.server_id:
        return
    os.environ["HOME"] = limits.home
    dog = Watchdog(directory, PROGRAM.name)
    dog.run()
    write_state(directory, "state.json", dog.state._replace(released=limits.server_id))

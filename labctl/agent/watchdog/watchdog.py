"""The watchdog: ends the server at its deadline, its budget, or when nobody works on it.

`python3 PROGRAM watchdog DIRECTORY` runs until the end. One loop reads the clocks, which never
waits for anything: looking for signs of work, and the wind-down, are threads of their own. What it
knows is written at every tick, so that the next watchdog, after a crash or a reboot, carries on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..host.paths import read_json
from ..program import PROGRAM
from .activity import Look, Looker, Signs
from .boot_timer import is_armed, tell_timer
from .decisions import (
    RATE_BYTES_S,
    Decision,
    begins_anew,
    carried,
    clocks,
    decide,
    described,
    spoken,
    wind_down_s,
)
from .imds import Imds
from .limits import Told
from .mirroring import INTERVAL_S, Mirror
from .mirroring import Told as Mirrored
from .notify import run_logs, tell
from .poweroff import Ending
from .reclaim import Reclaims
from .recorder import Recorder
from .saved_results import estimate
from .shutdown import Plan, live_runs, unable
from .state_files import FRESH_S, Lock, boot_id, boottime_s, decided, keep
from .wakeup import Bell, ring

TICK_S, LAST_TICK_S = 5.0, 1.0
LAST_S = 90.0
ESTIMATE_EVERY_S = 60.0
# How long an idle server that keeps unsaved results is left alone before the next look.
STAY_S = 600.0
# Who starts a server again whose budget is spent has so long to raise it, or to pull.
AFTER_BOOT_S = 60.0
MOST_WIND_DOWN_S = 2 * 3600.0
SHOWN_S = PAUSE_S = 60.0


class Watchdog:
    def __init__(self, place: Path, version: str) -> None:
        self.place = place
        self.version = version
        self.told = Told(place)
        self.state: dict[str, Any] = read_json(place / "state.json")
        self.boot = boot_id()
        self.looker: Looker | None = None
        self.ending: Ending | None = None
        self.last_work_s = boottime_s()
        self.was_busy: bool | None = None
        self.unsaved = (0, 0)
        self.cannot: list[str] | None = None
        self.explore_now = threading.Event()
        self.stay_until_s = 0.0
        self.not_before_s = 0.0
        self.idle_due_s = 0.0
        self.rate_bytes_s = float(self.state.get("rate_bytes_s") or RATE_BYTES_S)
        self.bell = Bell(place)
        self.reclaims = Reclaims(place, self.say)
        self.mirror = Mirror(self.say)

    def run(self) -> None:
        """Until the server has been given back; where it is powered off, until that happens."""
        self._resume()
        while True:
            self._reload()
            decision = self._tick()
            if self.ending is not None and self.ending.released:
                return
            left = decision.ends_in_s
            near = left is not None and left < LAST_S
            wait = LAST_TICK_S if near or self.ending else TICK_S
            if left is not None and not self.ending:
                wait = max(0.05, min(wait, left))
            self.bell.wait(wait)

    # What it knows

    def _resume(self) -> None:
        self.told.changed()
        if self.state.get("server_id") != self.told.body.get("server_id"):
            self.state = {}
        if self.state:
            self._carry_on()
        self._take_limits()
        self.looker = Looker(Signs(self.told.plan.account), lambda: ring(self.place))
        self.looker.set_idle_limit(self.told.limits.idle_s)
        threading.Thread(target=self._explore, daemon=True).start()
        self.reclaims.listen(Imds())
        Recorder(lambda: self.told.plan.account, self.say)

    def _carry_on(self) -> None:
        """Elapsed and idle time as they were. A reboot is work; time without a watchdog is none."""
        rebooted = self.state["boot"] != self.boot
        elapsed = carried(self.state, self.boot, boottime_s(), time.time())
        why = f"{spoken(elapsed)} had gone by"
        self.say("watching again" + (" after a reboot" if rebooted else ""), why, elapsed)
        self.state.pop("ending", None)
        ended = self.state.pop("ended", "")
        if not rebooted:
            self.last_work_s -= float(self.state["idle_for_s"])
            return
        self.not_before_s = boottime_s() + AFTER_BOOT_S
        if begins_anew(self.told.limits, elapsed, ended == "ttl"):
            self._begin_anew(elapsed)

    def _begin_anew(self, elapsed: float) -> None:
        with self.told.changing() as limits:
            limits.update(from_s=elapsed, extended_s=0.0, held_until_s=0.0)
        self.state["warned"] = {}
        self.say("the ttl begins anew", "the server was off at its deadline, and is used again")

    def _reload(self) -> None:
        if self.told.changed():
            if self.state.get("server_id") not in (None, self.told.body["server_id"]):
                self.state, self.last_work_s = {}, boottime_s()
            self._take_limits()
            self.last_work_s = boottime_s()  # somebody is there who changes it
            if self.looker:
                self.looker.set_idle_limit(self.told.limits.idle_s)
                self.looker.look_now()
            self.cannot = None
            self.explore_now.set()
            self.stay_until_s = self.not_before_s = 0.0

    def _take_limits(self) -> None:
        """The server is as old as the oldest that anybody knows."""
        now, wall = boottime_s(), time.time()
        elapsed = carried(self.told.body["age"], self.boot, now, wall)
        if self.state:
            elapsed = max(elapsed, carried(self.state, self.boot, now, wall))
        self._remember(elapsed)
        if self.state.get("edition") != self.told.body["edition"]:
            self.state["edition"] = self.told.body["edition"]
            self.say("limits", described(self.told.limits))

    def _remember(self, elapsed_s: float) -> None:
        self.state.update(
            server_id=self.told.body["server_id"],
            boot=self.boot,
            boottime_s=boottime_s(),
            wall_s=time.time(),
            elapsed_s=elapsed_s,
            rate_bytes_s=self.rate_bytes_s,
        )

    def elapsed_s(self) -> float:
        return carried(self.state, self.boot, boottime_s(), time.time())

    def say(self, what: str, why: str, elapsed_s: float | None = None) -> None:
        """A decision, written down."""
        decided(self.place, self.elapsed_s() if elapsed_s is None else elapsed_s, what, why)

    def _explore(self) -> None:
        """Slow questions, in a thread: what could not be saved at the end, what is not yet."""
        asked, found = None, []
        while True:
            plan = self.told.plan
            if (plan.store, plan.disk) != asked:
                asked, found = (plan.store, plan.disk), unable(plan)
                for one in found:
                    self.say("cannot be saved", one)
            if self.cannot is None:
                self.cannot = found
                ring(self.place)
            with suppress(OSError, ValueError):
                self.unsaved = estimate(plan.lab_id, plan.every_lab)
            self.explore_now.wait(ESTIMATE_EVERY_S)
            self.explore_now.clear()

    # What it decides

    def _tick(self) -> Decision:
        now = boottime_s()
        look = self.looker.latest if self.looker else None
        idle_for = self._idle_for(look, now)
        elapsed = self.elapsed_s()
        plan = self.told.plan
        runs = [s for s in (look.busy if look else []) if s.startswith("run ")]
        self._mirror(plan, frozenset(runs))
        early = wind_down_s(
            plan.grace_s if runs else 0.0,
            self.unsaved[1],
            self.rate_bytes_s,
            bool(plan.store or plan.saver_s),
            plan.saver_s,
        )
        warned = self.state.get("warned") or {}
        decision = decide(self.told.limits, elapsed, idle_for, early, warned)
        self.state["warned"] = decision.warned
        self._count_idle(idle_for, elapsed)
        if self.ending is not None:
            self._go_on(self.ending, elapsed)
        elif self.reclaims.look(plan, self.unsaved[1], self.rate_bytes_s):
            pass  # its provider ends it
        elif decision.end and self._sure(decision, look, now):
            self._begin(decision, elapsed, idle_for)
        elif decision.warn_s is not None:
            self._warn(decision)
        # Whoever has started a server again whose budget is spent may still raise it.
        waits = self.ending is not None or now < self.not_before_s
        tell_timer(self.boot, self.told.limits, elapsed, waits=waits)
        self._remember(elapsed)
        keep(self.place, "state.json", self.state)
        self._show(decision, look, elapsed, idle_for)
        return decision

    def _mirror(self, plan: Plan, runs: frozenset[str]) -> None:
        """The end has a pass of its own."""
        if plan.store and self.ending is None:
            every_s = float(self.told.body.get("mirror_s") or INTERVAL_S)
            self.mirror.look(Mirrored(plan.account, plan.lab_id, plan.every_lab, every_s, runs))

    def _count_idle(self, idle_for: float, elapsed: float) -> None:
        """Idle time altogether, for the share that costs show. A short pause is none."""
        since = max(0.0, elapsed - float(self.state.get("counted_s") or elapsed))
        if idle_for > PAUSE_S:
            self.state["idle_total_s"] = float(self.state.get("idle_total_s") or 0.0) + since
        self.state.update(counted_s=elapsed, idle_for_s=idle_for)

    def _idle_for(self, look: Look | None, now: float) -> float:
        """Seconds since the last sign of work; 0 while there is one, or nobody could look."""
        if look is None:
            return max(0.0, now - self.last_work_s)
        if now - look.began_s > FRESH_S:
            self._turn(True, "signs of work cannot be read (looking takes too long)")
            self.last_work_s = now
            return 0.0
        if look.busy:
            self._turn(True, look.busy[0])
            self.last_work_s = now
            return 0.0
        self._turn(False, "no sign of work")
        self.last_work_s = max(self.last_work_s, look.began_s - look.quiet_s)
        return max(0.0, now - self.last_work_s)

    def _turn(self, busy: bool, why: str) -> None:
        if busy != self.was_busy:
            self.was_busy = busy
            self.say("at work" if busy else "idle", why)

    def _sure(self, decision: Decision, look: Look | None, now: float) -> bool:
        """A server ends as idle only after a look that began when it was due to."""
        if now < self.not_before_s:
            return False
        if decision.ends_by != "idle":
            return True
        if now < self.stay_until_s:
            return False
        if not self.idle_due_s or decision.ends_in_s is None:
            self.idle_due_s = now
        if look is not None and look.began_s >= self.idle_due_s:
            return True
        if self.looker:
            self.looker.look_now()
        return False

    def _warn(self, decision: Decision) -> None:
        self.idle_due_s = 0.0
        left = spoken(decision.warn_s or 0.0)
        why = self._because(decision.ends_by)
        text = f"this server ends in {left}: {why}."
        if self.told.plan.disk == "goes" or self.cannot:
            text += " What is only here is lost then: labctl pull."
        elif self.told.plan.saver_s and decision.ends_by != "idle":
            text += " The course's keeper saves the results first."
        if decision.ends_by != "budget":
            text += " labctl extend 30m gives more time."
        self.say(f"warned, {left} left", why)
        threading.Thread(target=self._tell, args=(text,), daemon=True).start()

    def _tell(self, text: str) -> None:
        """In a thread: the engine is asked which runs live at this moment."""
        plan = self.told.plan
        tell(plan.account, text, run_logs(live_runs(plan)))

    def _because(self, by: str) -> str:
        limits = self.told.limits
        if by == "idle":
            return f"nobody has worked on it (limit {spoken(limits.idle_s or 0)})"
        if by == "budget":
            return f"its budget of {limits.budget_usd or 0:.2f} dollars is spent"
        return f"its time is up ({spoken(limits.deadline_s or 0)})"

    # How it ends

    def _begin(self, decision: Decision, elapsed: float, idle_for: float) -> None:
        by = decision.ends_by
        self.idle_due_s = 0.0
        limit = clocks(self.told.limits, elapsed, idle_for, 0.0)[by]
        self.say(f"ending ({by})", self._because(by))
        self.state["ending"] = by
        text = f"this server ends now: {self._because(by)}."
        threading.Thread(target=self._tell, args=(text,), daemon=True).start()
        self.ending = Ending(self.told.plan, by, elapsed, elapsed + limit.left_s, self.say)

    def _go_on(self, ending: Ending, elapsed: float) -> None:
        """Look after a wind-down: it may take long, but not for ever."""
        outcome = ending.outcome
        if outcome is not None and not outcome.end:
            self.ending, self.stay_until_s = None, boottime_s() + STAY_S
            self.state.pop("ending", None)
            return
        if outcome is None and elapsed - ending.began_s < MOST_WIND_DOWN_S:
            return
        if outcome is None:
            self.say("wind-down given up", f"it took more than {spoken(MOST_WIND_DOWN_S)}")
        elif outcome.rate_bytes_s:
            self.rate_bytes_s = outcome.rate_bytes_s
        if not ending.attempts:
            self.state["overrun_s"] = ending.overrun_s(elapsed)
            self.state["ended"] = ending.by
            self._remember(elapsed)
            keep(self.place, "state.json", self.state)
        ending.finish()

    def _show(self, decision: Decision, look: Look | None, elapsed: float, idle_for: float) -> None:
        """status.json: what the verbs `watch` and `status` show."""
        limits = self.told.limits
        running = clocks(limits, elapsed, idle_for, 0.0)
        left = {name: round(clock.left_s, 1) for name, clock in running.items()}
        recent = [s for s in (look.signs if look else []) if s.age_s < SHOWN_S]
        body = {
            "server_id": self.told.body["server_id"],
            "lab_id": self.told.body["lab_id"],
            "version": self.version,
            "edition": self.told.body["edition"],
            "boot": self.boot,
            "boottime_s": boottime_s(),
            "elapsed_s": round(elapsed, 1),
            "ttl_left_s": left.get("ttl"),
            "budget_left_s": left.get("budget"),
            "idle_for_s": round(idle_for, 1),
            "idle_left_s": left.get("idle", limits.idle_s),
            "ends_in_s": None if decision.ends_in_s is None else round(decision.ends_in_s, 1),
            "ends_by": decision.ends_by,
            "idle_total_s": round(self.state.get("idle_total_s", 0.0), 1),
            "spent_usd": round(elapsed / 3600 * limits.price_usd_per_hour, 4),
            "busy": [f"{s.said}, {spoken(s.age_s)} ago" if s.age_s else s.said for s in recent],
            "timer": is_armed(),
            "cannot": self.cannot,
            "unsaved": {"files": self.unsaved[0], "bytes": self.unsaved[1]},
            "ending": self.state.get("ending", ""),
            "overrun_s": self.state.get("overrun_s", 0.0),
            "reclaim": self.reclaims.shown,
            "mirror": self.mirror.shown,
            "pid": os.getpid(),
        }
        keep(self.place, "status.json", body)


def run(request: dict[str, Any]) -> None:
    """The verb `watchdog`: `sys.argv[2]` is the directory. A second one ends at once."""
    place = Path(sys.argv[2])
    lock = Lock(place)
    if not lock.take():
        return
    body = read_json(place / "limits.json")
    if not body or read_json(place / "state.json").get("released") == body["server_id"]:
        return
    os.environ["HOME"] = body["home"]
    dog = Watchdog(place, PROGRAM.name)
    dog.run()
    dog.state["released"] = body["server_id"]
    keep(place, "state.json", dog.state)

"""A server that its provider takes back: notices are heard, runs wind down, results are sent.

A recommendation to rebalance only has what is new sent at once. An interruption has every run get
SIGTERM, and what it wrote then sent before the time is up. Nothing here powers the server off: that
is the provider's, and a run that goes on until then does no harm.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

from ..host.paths import read_json, write_json
from ..host.sudo import as_root
from ..reply import Failure
from .decisions import spoken
from .imds import Imds, found
from .mirroring import FAILURES, send_all, why_of
from .notify import run_logs, tell
from .provider_notice import INTERRUPTION, MARGIN_S, Acted, Notice, decide, handed, stop_within_s
from .reclaim_record import Taken
from .saved_results import unsaved
from .shutdown import Plan, Say, live_runs, running
from .state_files import ROOT_DIR, Lock, boot_id, boottime_s, found_dir
from .wakeup import ring

POLL_S = 5.0
LOOK_S = 0.1
PAUSE_S = 1.0
# Who has written a checkpoint is about to end: its last lines are worth this wait.
LINGER_S = 2.0
# A store that failed is tried again so soon, and a run that goes on is sent anew.
AGAIN_S = 3.0
FILE = "notice.json"
Send = Callable[[Plan, Say], "list[str]"]


def send_new(plan: Plan, say: Say) -> list[str]:
    """Send what is only here to the store; paths of what could not be sent. Failure, OSError."""
    send_all(plan.account, plan.lab_id, plan.every_lab, say)
    left = unsaved(plan.account, plan.lab_id, plan.every_lab)
    return [file.path for file in left.files]


class Reclaims:
    """What one watchdog has heard and done. `look` at every tick; the rest are threads.

    `shown` is W's "reclaim" while the server is being taken back: kind, action, source, heard_at,
    ends_at, and ready_at once the runs have ended and what can be saved is; else None.
    """

    def __init__(self, place: Path, say: Say, send: Send = send_new) -> None:
        self.place = place
        self.say = say
        self.send = send
        self.acted = Acted()
        self.shown: dict[str, Any] | None = None
        self._said: list[Notice] = []
        self._sending = threading.Lock()

    def listen(self, imds: Imds) -> None:
        """Poll a metadata service from now on, where there is one."""
        threading.Thread(target=self._poll, args=(imds,), daemon=True).start()

    @property
    def under_way(self) -> bool:
        """From an interruption's notice until the server goes, or its time has passed."""
        return self.acted.under_way is not None

    def look(self, plan: Plan, unsaved_bytes: int, rate_bytes_s: float) -> bool:
        """Act on what was heard since, and return at once: whether it is being taken back."""
        now = boottime_s()
        given = handed(read_json(self.place / FILE), boot_id(), now)
        heard = [*self._said, *([given] if given else [])]
        self.acted, do = decide(self.acted, heard, now)
        if do == "mirror":
            self._begin(self._mirror, plan)
        elif do == "passed":
            self.say("not taken back", "the notice's time is over, and the server is still there")
            self.shown = None
        elif do and self.acted.under_way:
            notice = self.acted.under_way
            left_s = notice.left_s
            stop_s = stop_within_s(left_s, unsaved_bytes, rate_bytes_s, bool(plan.store))
            self.shown = {
                "kind": notice.kind,
                "action": notice.action,
                "source": notice.source,
                "heard_at": time.time(),
                "ends_at": time.time() + left_s,
                "ready_at": None,
            }
            why = f"{notice.source} says: {notice.action} in {spoken(left_s)}"
            self.say("being taken back", why)
            self._begin(self._wind_down, plan, stop_s, now + left_s)
        return self.under_way

    def _begin(self, deed: Callable[..., None], *words: Any) -> None:
        def go() -> None:
            try:
                deed(*words)
            except FAILURES as error:
                self.say("reclaim: went wrong", why_of(error))

        threading.Thread(target=go, daemon=True).start()

    def _poll(self, imds: Imds) -> None:
        if not found(imds):
            return
        self.say("listening", "the machine's metadata service is asked for notices")
        silent = False
        while True:
            try:
                said, silent = imds.notices(), False
            except OSError as error:
                if not silent:
                    self.say("not listening", f"{error}; asked again")
                said, silent = self._said, True
            news, self._said = said != self._said, said
            if news and said:
                ring(self.place)
            time.sleep(POLL_S)

    def _mirror(self, plan: Plan) -> None:
        """A recommendation: the run goes on, and is safer."""
        self.say("rebalance recommended", "the server may be taken back soon; the run goes on")
        text = "this server may be taken back soon (its provider's recommendation). "
        text += "Results are mirrored now." if plan.store else "There is no store: labctl pull."
        tell(plan.account, text, run_logs(live_runs(plan)))
        self._sent(plan, [])

    def _wind_down(self, plan: Plan, stop_s: float, ends_s: float) -> None:
        began, notice = boottime_s(), dict(self.shown or {})
        notice.pop("ready_at", None)
        last_s = ends_s - MARGIN_S
        try:
            runs = [Taken(one, notice, self.say) for one in _runs(plan)]
        except Failure as failure:
            self.say("runs not stopped", failure.body["what"])
            runs = []
        for run in runs:
            run.ask_to_end()
        self._begin(self._tell, plan, ends_s - began, [run.run for run in runs])
        _until(plan, runs, lambda run: run.ended or run.safe, began + stop_s)
        _until(plan, runs, lambda run: run.ended, min(boottime_s() + LINGER_S, began + stop_s))
        self._sent(plan, runs)
        while late := [run for run in runs if not run.done(bool(plan.store))]:
            if boottime_s() >= last_s:
                break
            _until(plan, late, lambda run: run.ended, min(boottime_s() + AGAIN_S, last_s))
            if plan.store:
                time.sleep(PAUSE_S)
                self._sent(plan, late)
        now = boottime_s()
        told = f"{now - began:.1f} s after the notice, {ends_s - now:.1f} s before its end"
        self.say("ready to be taken", told)
        if self.shown:
            self.shown = {**self.shown, "ready_at": time.time()}
            ring(self.place)

    def _tell(self, plan: Plan, left_s: float, runs: list[str]) -> None:
        text = f"this server is taken back in {spoken(left_s)} (its provider's notice). "
        text += "Runs end now and write a checkpoint; "
        text += "results go to the store." if plan.store else "there is no store: labctl pull NOW."
        tell(plan.account, text, run_logs(runs))

    def _sent(self, plan: Plan, runs: list[Taken]) -> None:
        if not plan.store:
            self.say("not mirrored", "the lab has no store: what is not pulled is lost")
            return
        try:
            with self._sending:
                left = self.send(plan, self.say)
        except FAILURES as error:
            self.say("not mirrored", why_of(error))
            return
        for run in runs:
            run.mirrored(left)


def _runs(plan: Plan) -> list[dict[str, Any]]:
    return running("labctl.run", "" if plan.every_lab else plan.lab_id)


def _until(plan: Plan, runs: list[Taken], done: Callable[[Taken], bool], until_s: float) -> None:
    """Look at the runs until it is so for all of them, or until `until_s` since boot."""
    while True:
        with suppress(Failure):  # an engine that restarts says nothing of them
            alive = {one["Id"] for one in _runs(plan)}
            for run in runs:
                run.look(alive)
        if all(done(run) for run in runs) or boottime_s() >= until_s:
            return
        time.sleep(LOOK_S)


def notice(request: dict[str, Any]) -> dict[str, Any]:
    """The verb `reclaim-notice`: have the watchdog act as if its provider had said so.

    "left_s" until the end, "kind" (interruption), "action" (terminate), "source" (who says so).
    Failure "missing" where no watchdog runs.
    """
    place = found_dir(request["lab_id"])
    if place is None or not Lock(place).holder():
        said = "no watchdog runs on this server, so nobody would hear a notice"
        raise Failure("missing", said, "", "labctl up arms it")
    if place == ROOT_DIR and os.geteuid() != 0:
        return as_root("reclaim-notice", request)
    body = {
        "boot": boot_id(),
        "ends_s": boottime_s() + float(request["left_s"]),
        "kind": request.get("kind", INTERRUPTION),
        "action": request.get("action", "terminate"),
        "source": request.get("source", "labctl"),
        "stamp": os.urandom(8).hex(),
    }
    write_json(place / FILE, body)
    ring(place)
    return {}

"""Reclaim of the server by its provider: notices arrive, runs wind down, results are sent.

After a rebalance recommendation, new results are sent at once. After an interruption notice, every
run gets SIGTERM, and what it writes then is sent before the time is up. Nothing here powers the
server off: the provider does that, and a run that continues until then does no harm.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

from ...wire.codec import to_json
from ...wire.text import duration_text
from ...wire.verbs import UP_COMMAND, Empty
from ...wire.watchdog import (
    RECLAIM_NOTICE,
    ClientNoticeRecord,
    NoticeRecord,
    ReclaimNoticeRequest,
    ReclaimRecord,
)
from ..host.paths import read_boottime_s, read_record, write_json
from ..host.sudo import call_as_root
from ..reply import Failure
from .mirroring import FAILURES, error_text, send_all
from .notice_services import NoticeService
from .notify import list_run_logs, notify
from .provider_notice import (
    MARGIN_S,
    HandledNotices,
    ReclaimNotice,
    convert_client_notice,
    decide_reclaim_action,
    limit_stop_s,
)
from .reclaim_record import ReclaimedRun
from .saved_results import list_unsaved
from .shutdown import Say, ShutdownPlan, list_live_attempts, list_live_runs
from .state_files import ROOT_DIR, Lock, find_directory, read_boot_id
from .wakeup import wake_watchdog

RUN_POLL_S = 0.1
PAUSE_S = 1.0
# seconds to wait for the last log lines of a run that has written its checkpoint
LINGER_S = 2.0
# seconds before a failed store is tried again, and a run that continues is sent again
AGAIN_S = 3.0
FILE = "notice.json"


def _send_new(plan: ShutdownPlan, say: Say) -> list[str]:
    """Send results that exist only here to the store; return the paths of those that failed.

    Raises Failure or OSError.
    """
    send_all(plan.account, plan.lab_id, plan.every_lab, say)
    remaining = list_unsaved(plan.account, plan.lab_id, plan.every_lab)
    return [file.path for file in remaining.files]


class ReclaimHandler:
    """Notices that the watchdog has received, and its actions. `act_on_notices` runs at every tick.

    The rest runs in threads. `shown` is what the watchdog's status says while the server is being
    reclaimed, else None.
    """

    def __init__(self, directory: Path, say: Say) -> None:
        self.directory = directory
        self.say = say
        self.acted = HandledNotices()
        self.shown: ReclaimRecord | None = None
        self._polled: list[ReclaimNotice] = []
        self._sending = threading.Lock()

    def listen(self, service: NoticeService) -> None:
        """Poll a metadata service from now on, if the machine has it."""
        threading.Thread(target=self._poll, args=(service,), daemon=True).start()

    @property
    def under_way(self) -> bool:
        """Whether an interruption is under way, from its notice until its time has passed."""
        return self.acted.under_way is not None

    def act_on_notices(self, plan: ShutdownPlan, unsaved_bytes: int, rate_bytes_s: float) -> bool:
        """Act on new notices and return at once; return whether the server is being reclaimed."""
        now = read_boottime_s()
        given = read_record(ClientNoticeRecord, self.directory / FILE)
        client_notice = convert_client_notice(given, read_boot_id(), now) if given else None
        notices = [*self._polled, *([client_notice] if client_notice else [])]
        self.acted, action = decide_reclaim_action(self.acted, notices, now)
        if action == "mirror":
            self._run_in_thread(self._handle_rebalance, plan)
        elif action == "passed":
            self.say("not reclaimed", "the notice has expired, and the server still exists")
            self.shown = None
        elif action and self.acted.under_way:
            notice = self.acted.under_way
            left_s = notice.left_s
            stop_s = limit_stop_s(left_s, unsaved_bytes, rate_bytes_s, bool(plan.store))
            self.shown = ReclaimRecord(
                kind=notice.kind,
                action=notice.action,
                source=notice.source,
                heard_at=time.time(),
                ends_at=time.time() + left_s,
            )
            why = f"{notice.source} says: {notice.action} in {duration_text(left_s)}"
            self.say("reclaim notice", why)
            self._run_in_thread(self._wind_down, plan, self.shown, stop_s, now + left_s)
        return self.under_way

    def _run_in_thread(self, action: Callable[..., None], *arguments: Any) -> None:
        def run_safely() -> None:
            try:
                action(*arguments)
            except FAILURES as error:
                self.say("reclaim handling failed", error_text(error))

        threading.Thread(target=run_safely, daemon=True).start()

    def _poll(self, service: NoticeService) -> None:
        if not service.is_available():
            return
        self.say("watching for reclaim", "polling the machine's metadata service for notices")
        has_failed = False
        while True:
            try:
                notices, has_failed = service.read(), False
            except OSError as error:
                if not has_failed:
                    self.say("reclaim notices unavailable", f"{error}; trying again")
                notices, has_failed = self._polled, True
            is_new, self._polled = notices != self._polled, notices
            if is_new and notices:
                wake_watchdog(self.directory)
            time.sleep(service.poll_s)

    def _handle_rebalance(self, plan: ShutdownPlan) -> None:
        """Handle a recommendation: save results while the run continues."""
        self.say("rebalance recommended", "the server may be reclaimed soon; the run continues")
        text = "the provider may reclaim this server soon (its recommendation). "
        text += "Results are mirrored now." if plan.store else "The lab has no store: labctl pull."
        notify(plan.account, text, list_run_logs(list_live_runs(plan)))
        self._send_results(plan, [])

    def _wind_down(
        self, plan: ShutdownPlan, reclaim: ReclaimRecord, stop_s: float, ends_s: float
    ) -> None:
        began_s = read_boottime_s()
        notice = NoticeRecord(
            reclaim.kind, reclaim.action, reclaim.source, reclaim.heard_at, reclaim.ends_at
        )
        last_s = ends_s - MARGIN_S
        try:
            runs = [ReclaimedRun(one, notice, self.say) for one in list_live_attempts(plan)]
        except Failure as failure:
            self.say("runs not stopped", failure.report.what)
            runs = []
        for run in runs:
            run.send_sigterm()
        self._run_in_thread(self._notify, plan, ends_s - began_s, [run.run for run in runs])
        _watch_until(plan, runs, lambda run: run.is_ended or run.is_safe, began_s + stop_s)
        _watch_until(
            plan,
            runs,
            lambda run: run.is_ended,
            min(read_boottime_s() + LINGER_S, began_s + stop_s),
        )
        self._send_results(plan, runs)
        while late := [run for run in runs if not run.is_done(bool(plan.store))]:
            if read_boottime_s() >= last_s:
                break
            _watch_until(
                plan, late, lambda run: run.is_ended, min(read_boottime_s() + AGAIN_S, last_s)
            )
            if plan.store:
                time.sleep(PAUSE_S)
                self._send_results(plan, late)
        now = read_boottime_s()
        timing = f"{now - began_s:.1f} s after the notice, {ends_s - now:.1f} s before its end"
        self.say("ready for reclaim", timing)
        if self.shown:
            self.shown = self.shown._replace(ready_at=time.time())
            wake_watchdog(self.directory)

    def _notify(self, plan: ShutdownPlan, left_s: float, runs: list[str]) -> None:
        text = f"the provider reclaims this server in {duration_text(left_s)}. "
        text += "Runs end now and write a checkpoint. "
        text += "Results go to the store." if plan.store else "Save results now: labctl pull."
        notify(plan.account, text, list_run_logs(runs))

    def _send_results(self, plan: ShutdownPlan, runs: list[ReclaimedRun]) -> None:
        if not plan.store:
            self.say("not mirrored", "the lab has no store: results that are not pulled are lost")
            return
        try:
            with self._sending:
                failed_paths = _send_new(plan, self.say)
        except FAILURES as error:
            self.say("not mirrored", error_text(error))
            return
        for run in runs:
            run.record_mirrored(failed_paths)


def _watch_until(
    plan: ShutdownPlan,
    runs: list[ReclaimedRun],
    done: Callable[[ReclaimedRun], bool],
    until_s: float,
) -> None:
    """Check the runs until `done` holds for all of them, or until `until_s` since boot."""
    while True:
        with suppress(Failure):  # a restarting engine does not list them
            alive = {attempt.name for attempt in list_live_attempts(plan)}
            for run in runs:
                run.update(alive)
        if all(done(run) for run in runs) or read_boottime_s() >= until_s:
            return
        time.sleep(RUN_POLL_S)


def notice(request: ReclaimNoticeRequest) -> Empty:
    """Have the watchdog act as after a provider's notice (verb `reclaim-notice`).

    Failure (missing) if no watchdog runs.
    """
    directory = find_directory(request.lab_id)
    if directory is None or not Lock(directory).holder():
        what = "no watchdog is running on this server to receive a reclaim notice"
        raise Failure("missing", what, "", UP_COMMAND)
    if directory == ROOT_DIR and os.geteuid() != 0:
        return call_as_root(RECLAIM_NOTICE, request)
    given = ClientNoticeRecord(
        boot=read_boot_id(),
        ends_s=read_boottime_s() + request.left_s,
        kind=request.kind,
        action=request.action,
        source=request.source,
        stamp=os.urandom(8).hex(),
    )
    write_json(directory / FILE, to_json(given))
    wake_watchdog(directory)
    return Empty()

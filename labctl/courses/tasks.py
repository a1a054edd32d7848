"""The keeper's periodic tasks: class hours, budgets and deadlines, the roster.

Each task works on a `CourseSnapshot`, one snapshot of the provider's servers, and may be repeated.
A failure for one seat is reported and stops no other.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Literal

from labctl.courses import broadcast, metering, server_shutdown, servers, teardown
from labctl.courses.context import SAVER_S, sum_staff_extensions_s
from labctl.courses.join_codes import withdraw_page_codes
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.leftovers import remove_expired_disks
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.ledger_servers import is_unseen_end
from labctl.courses.records.spending import allowance_usd, compute_spending
from labctl.courses.records.timetable import Lesson, find_just_ended, find_phase
from labctl.courses.requests import RequestHandler
from labctl.courses.servers import ENDED, CourseOperator
from labctl.courses.shared_seats import SharedSeats
from labctl.courses.status import build_seat_context, read_status
from labctl.errors import LabError
from labctl.errors.unexpected import as_lab_error
from labctl.lifecycle import unsaved_server
from labctl.model import Server
from labctl.servers import guard
from labctl.text import dollars_text, duration_text

# Warnings, in percent of a seat's budget.
WARN_AT = (100, 80, 50)
# Seconds after the budget is used up, or the time is over, before the sweep ends the server: enough
# to finish a checkpoint. Its own watchdog has acted before, unless somebody has stopped it.
GRACE_S = 600.0
# Seconds for which a provider may not list a server that it has just created.
YOUNG_S = 60.0
AT_ONCE = 64
# Seconds for saving what is on a server once its budget or its time is over.
SAVE_S = 3600.0
# Seconds that one sweep waits for the ends that it has started; they continue after that.
PATIENCE_S = 120.0
AFTER_CLASS_S = 2 * 3600.0
IDLE_AFTER_CLASS_S = 1800.0
Reason = Literal["budget", "time", "left", "class"]


@dataclass(frozen=True)
class CourseSnapshot:
    """A snapshot of the provider's servers at time `at`, by the lab id of their seat."""

    at: float
    servers: dict[str, Server]


@dataclass
class CourseTasks:
    """The periodic tasks of a course. `notify` takes a seat's name ("" for none) and a message."""

    staff: CourseOperator
    request_handler: RequestHandler
    keys: AuthorizedKeys
    notify: Callable[[str, str], None]
    now: Callable[[], float] = time.time
    _seen: tuple[int, ...] = ()
    _ends: dict[str, threading.Thread] = field(default_factory=dict)
    _rescues: dict[str, threading.Thread] = field(default_factory=dict)
    _over_since: dict[str, float] = field(default_factory=dict)
    _slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_ONCE))

    def take_snapshot(self) -> CourseSnapshot:
        """Ask the provider once for all seats, and record what they have cost since."""
        course = self.staff.course()
        listed = course.provider.servers()
        metering.record_costs(self.staff.folder, course, listed)
        by_lab = {server.lab_id: server for server in listed if server.state not in ENDED}
        return CourseSnapshot(at=self.now(), servers=by_lab)

    def apply_roster(self) -> None:
        """Revoke the keys of students who have left the course, and release their servers."""
        folder = self.staff.folder
        self._reload()
        active = {student.id for student in folder.list_students()}
        inactive = [student for student in self.keys.list_students() if student not in active]
        for student in self.keys.expel(inactive) if inactive else []:
            self.notify(student, "has left the course: the key was revoked")
        withdraw_page_codes(folder, active)
        for seat_server in self.request_handler.list_seat_servers():
            holders = {claim.student for claim in seat_server.claims if not claim.leaving}
            former = {
                student
                for student in holders
                if student not in active
                or folder.find_seat_of(student).name != seat_server.seat.name
            }
            if former:
                seat_server.release_all(tuple(former))

    def _reload(self) -> None:
        """Reload course.yaml and the roster if they changed and are valid."""
        folder = self.staff.folder
        seen = tuple(
            path.stat().st_mtime_ns if path.exists() else 0
            for path in (folder.config.path, folder.roster_file)
        )
        if seen == self._seen:
            return
        fresh = CourseFolder(folder.path)
        fresh.config, fresh.list_students()  # a ConfigError changes nothing
        folder.refresh()
        if self._seen:
            self.notify("", "course.yaml and the roster were reloaded")
        self._seen = seen

    def apply_class_hours(self, snapshot: CourseSnapshot) -> None:
        """Bring servers up before class, and end unused ones after it."""
        config = self.staff.folder.config
        current, lesson = find_phase(config.hours, config.term, self.now(), config.holidays)
        if current != "off" and lesson is not None:
            self._bring_up_missing_servers(snapshot, lesson)
            return
        over = find_just_ended(
            config.hours, config.term, self.now(), AFTER_CLASS_S, config.holidays
        )
        if over is not None:
            self._end_after_class(snapshot, self.now() - over.ends)

    def sweep(self, snapshot: CourseSnapshot) -> None:
        """Warn seats that use up their budget; end servers beyond budget, time or membership."""
        folder = self.staff.folder
        entries = folder.ledger.list_entries()
        spent = compute_spending(
            entries, self.now(), folder.list_running(snapshot.servers.values())
        )
        lines: dict[str, list[CourseLedgerEntry]] = defaultdict(list)
        for entry in entries:
            lines[entry.seat].append(entry)
        for seat in folder.list_seats(active_only=False, former=True):
            own = lines[seat.name]
            allowance = allowance_usd(own, seat.name, folder.config.per_student.budget)
            usd = spent[seat.name].usd if seat.name in spent else 0.0
            server = snapshot.servers.get(seat.lab_id)
            if allowance is not None:
                self._warn(seat, own, usd, allowance, server)
            if server is None:
                continue
            rescued = self._start_rescue(seat, server, usd, allowance)
            if why := self._find_end_reason(seat, own, usd, allowance, server):
                if not rescued:
                    self._start_thread(seat.name, partial(self._save_and_end, seat, why))
                # Saving must not take forever, whichever thread does it.
                since = self._over_since.setdefault(server.id, self.now())
                if self.now() - since > SAVE_S:
                    self._start_thread(f"{seat.name} late", partial(self._end_late, seat, server))
        self._join_threads()
        for seat_server in self.request_handler.list_seat_servers():
            server = seat_server.server
            if server is not None and server.created_at < snapshot.at - YOUNG_S:
                seat_server.update_server(server, snapshot.servers.get(seat_server.seat.lab_id))
            seat_server.resume()

    def remove_disks(self) -> None:
        """Remove the kept disks of seats that have expired."""
        remove_expired_disks(self.staff)

    def reserve_hours(self) -> None:
        """Reserve the machines of a class on Slurm for its hours of the next days."""
        config = self.staff.folder.config
        if config.shared is None or not config.shared.has_queue:
            return
        provider = self.staff.course().provider
        assert isinstance(provider, SharedSeats), "a course with `shared` has accounts"
        provider.upkeep.reserve_hours()

    def refresh_status(self) -> None:
        """Refresh the status of every server, for idle hours and for the dashboard."""
        running = {
            server.lab_id for server in self.staff.state.list_servers() if server.state == "running"
        }
        seats = [seat for seat in self.staff.folder.list_seats() if seat.lab_id in running]
        if seats:
            read_status(self.staff, seats, refresh=True)

    def _start_rescue(
        self, seat: Seat, server: Server, usd: float, allowance: float | None
    ) -> bool:
        """Start saving a server's results if its end is near; return whether they are being saved.

        The sweep does not wait for it. If the watchdog is silent, the ledger decides.
        """
        rescue_thread = self._rescues.get(seat.name)
        if rescue_thread is not None and rescue_thread.is_alive():
            return True
        if server.state != "running":
            return False
        price = server.offer.price_usd_per_hour
        left_s = inf
        if allowance is not None and price > 0:
            left_s = (allowance - usd) / price * 3600 - SAVER_S
        if not server_shutdown.is_near_end(self.staff.state, server, self.now(), left_s):
            return False

        def save() -> None:
            limit = server_shutdown.await_shutdown(
                build_seat_context(self.staff, seat), self._find_recorded(server)
            )
            if limit is not None:
                with self._slots:
                    self._save_and_end(seat, limit)

        self._rescues[seat.name] = threading.Thread(target=save, name="seat-rescue", daemon=True)
        self._rescues[seat.name].start()
        return True

    def _find_recorded(self, server: Server) -> Server:
        """Return the recorded server, with its endpoint and keys: a provider lists neither."""
        return self.staff.state.get_server(server.id) or server

    def _bring_up_missing_servers(self, snapshot: CourseSnapshot, lesson: Lesson) -> None:
        """Bring up missing servers, except those that were put down on purpose during class."""
        last: dict[str, CourseLedgerEntry] = {}
        for entry in self.staff.folder.ledger.list_entries():
            if entry.kind in ("up", "down") and entry.at >= lesson.warm:
                last[entry.seat] = entry
        missing = [
            seat
            for seat in self.staff.folder.list_seats()
            if seat.lab_id not in snapshot.servers
            and (seat.name not in last or is_unseen_end(last[seat.name]))
        ]
        if not missing:
            return
        count = "1 server" if len(missing) == 1 else f"{len(missing)} servers"
        self.notify("", f"class starts soon: starting {count}")
        for outcome in servers.bring_up_servers(self.staff, missing):
            if outcome.error:
                self.notify(outcome.seat, ": ".join(filter(None, [outcome.error, outcome.why])))

    def _end_after_class(self, snapshot: CourseSnapshot, since_s: float) -> None:
        for seat in self.staff.folder.list_seats():
            server = snapshot.servers.get(seat.lab_id)
            if server is None or server.state != "running":
                continue
            is_held = any(
                not claim.leaving for claim in self.request_handler.get_seat_server(seat).claims
            )
            if is_held and since_s < IDLE_AFTER_CLASS_S:
                continue
            self._start_thread(seat.name, partial(self._end_unused, seat, server))
        self._join_threads()

    def _end_unused(self, seat: Seat, server: Server) -> None:
        if not self._is_busy(seat, server):
            self._save_and_end(seat, "class")

    def _start_thread(self, name: str, action: Callable[[], None]) -> None:
        """Run an action in a thread of its own, one at a time for each name.

        Students are root on their servers, which may never answer or answer nonsense: that must not
        delay the end of any other server.
        """
        if (thread := self._ends.get(name)) is not None and thread.is_alive():
            return

        def run() -> None:
            with self._slots:
                try:
                    action()
                except Exception as error:
                    self.notify(name, as_lab_error(error, partial(self.notify, name)).what)

        self._ends[name] = threading.Thread(target=run, name="seat-end", daemon=True)
        self._ends[name].start()

    def _join_threads(self) -> None:
        """Wait for the started threads, at most PATIENCE_S seconds."""
        end = time.monotonic() + PATIENCE_S
        for thread in self._ends.values():
            thread.join(max(0.0, end - time.monotonic()))
        self._ends = {name: thread for name, thread in self._ends.items() if thread.is_alive()}

    def _is_busy(self, seat: Seat, server: Server) -> bool:
        """Tell whether the server is in use; True if its watchdog does not answer."""
        try:
            report = guard.read_watchdog(
                build_seat_context(self.staff, seat), self._find_recorded(server)
            )
        except LabError:
            return True
        return report is None or bool(report.busy)

    def _warn(
        self,
        seat: Seat,
        entries: Iterable[CourseLedgerEntry],
        usd: float,
        allowance: float,
        server: Server | None,
    ) -> None:
        """Warn a seat once for each step, and again if its budget changed since."""
        share = 100 * usd / allowance if allowance > 0 else 100.0 if usd > 0 else 0.0
        step = next((percent for percent in WARN_AT if share >= percent), 0)
        if not step:
            return
        warnings = [entry.detail for entry in entries if entry.kind == "warned"]
        if any(
            float(detail.get("percent", 0)) >= step
            and detail.get("allowance_usd") == round(allowance, 2)
            for detail in warnings
        ):
            return
        text = _budget_text(step, usd, allowance)
        self.staff.folder.ledger.append(
            "warned",
            seat=seat.name,
            by="keeper",
            why=text,
            percent=step,
            allowance_usd=round(allowance, 2),
        )
        self.notify(seat.name, text)
        if server is not None and server.state == "running":
            self._start_thread(seat.name, partial(self._show_on_server, seat, text))

    def _show_on_server(self, seat: Seat, text: str) -> None:
        try:
            broadcast.send_message(self.staff, [seat], text)
        except LabError as error:
            self.notify(seat.name, f"could not show the warning on the server: {error.what}")

    def _find_end_reason(
        self,
        seat: Seat,
        own: list[CourseLedgerEntry],
        usd: float,
        allowance: float | None,
        server: Server,
    ) -> Reason | Literal[""]:
        """Return why the seat's server must end now, or "" if it may stay."""
        if not any(
            student.active for student in map(self.staff.folder.find_student, seat.students)
        ):
            return "left"
        if server.state == "stopped":
            return ""
        if allowance is not None and usd >= allowance and server.offer.price_usd_per_hour:
            warned = [
                entry.at
                for entry in own
                if entry.kind == "warned" and _is_final_warning(entry, allowance)
            ]
            if warned and self.now() - warned[-1] > GRACE_S:
                return "budget"
        longest = self.staff.folder.config.per_student.max_ttl + sum_staff_extensions_s(own)
        if server.offer.price_usd_per_hour and (self.now() > server.created_at + longest + GRACE_S):
            return "time"
        return ""

    def _end_late(self, seat: Seat, server: Server) -> None:
        """End a server whose results take too long to save, and keep its disk if possible.

        Nobody gets more time by making downloads slow.
        """
        late = LabError(f"not everything on it could be saved within {duration_text(SAVE_S)}")
        try:
            result: LabError = unsaved_server.stop_and_keep_disk(
                build_seat_context(self.staff, seat), server, late, home_is_saved=False
            )
        except LabError as error:
            result = error
        self.notify(seat.name, f"{result.what}: " + "; ".join(result.why.splitlines()))

    def _save_and_end(self, seat: Seat, why: Reason) -> None:
        """Save everything, then end the server. A failure is reported, and tried again later."""
        words = {
            "budget": "its budget is used up",
            "time": "its time is over",
            "left": "its students left the course or changed teams",
            "class": "class is over and nothing runs there",
        }
        self.notify(seat.name, f"ending its server: {words[why]}")
        try:
            outcomes = teardown.end_seats(replace(self.staff, why=words[why]), [seat])
        except LabError as error:
            self.notify(seat.name, ": ".join(filter(None, [error.what, error.why])))
            return
        for ending in outcomes:
            if ending.error:
                self.notify(seat.name, ": ".join(filter(None, [ending.error, ending.why])))


def _is_final_warning(entry: CourseLedgerEntry, allowance: float) -> bool:
    is_same_budget = entry.detail.get("allowance_usd") == round(allowance, 2)
    return is_same_budget and float(entry.detail.get("percent", 0)) >= 100


def _budget_text(step: int, usd: float, allowance: float) -> str:
    spent = f"{dollars_text(usd)} of {dollars_text(allowance)} is spent ({step}%)"
    if step < 100:
        return spent
    return f"{spent}: save a checkpoint now, the server ends within {duration_text(GRACE_S)}"

"""What the keeper does by itself: class hours, the sweep over budgets and ends, the roster.

Each deed takes what it needs from a `Look`, one answer of the provider's, and may be repeated. A
deed that fails for one seat is told and stops no other.
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

from labctl.courses import broadcast, metering, rescue, servers, teardown
from labctl.courses.context import SAVER_S, granted_s
from labctl.courses.keys import Keys
from labctl.courses.leftovers import remove_expired_disks
from labctl.courses.loading import open_course
from labctl.courses.records.folder import Seat
from labctl.courses.records.ledger import Entry
from labctl.courses.records.spending import allowance_usd, spending
from labctl.courses.records.timetable import Lesson, just_ended, phase
from labctl.courses.requests import Desk
from labctl.courses.servers import ENDED, Staff
from labctl.courses.status import ground_of, status
from labctl.errors import LabError
from labctl.errors.unexpected import as_lab_error
from labctl.lifecycle import down
from labctl.model import Server
from labctl.servers import guard

# Percent of a seat's budget.
WARN_AT = (100, 80, 50)
# To finish a checkpoint once the budget is used up, or the time is over: then the sweep acts. The
# server's own watchdog has acted before, unless somebody has stopped it.
GRACE_S = 600.0
# So long a provider may not show what it has just made.
YOUNG_S = 60.0
AT_ONCE = 64
# So long what is on a server may take to come home once its budget or its time is over.
SAVE_S = 3600.0
# So long a round waits for the ends that it has begun; they go on beside the next one.
PATIENCE_S = 120.0
AFTER_CLASS_S = 2 * 3600.0
IDLE_AFTER_CLASS_S = 1800.0
Reason = Literal["budget", "time", "left", "class"]


@dataclass(frozen=True)
class Look:
    """Who is there, at `at`, as the provider has just shown it: seat's lab id -> server."""

    at: float
    servers: dict[str, Server]


@dataclass
class Rounds:
    """One course's. `tell` takes a seat's name ("" for none) and what happened."""

    staff: Staff
    desk: Desk
    keys: Keys
    tell: Callable[[str, str], None]
    now: Callable[[], float] = time.time
    _seen: tuple[int, ...] = ()
    _going: dict[str, threading.Thread] = field(default_factory=dict)
    _rescues: dict[str, threading.Thread] = field(default_factory=dict)
    _over_since: dict[str, float] = field(default_factory=dict)
    _turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_ONCE))

    def look(self) -> Look:
        """Ask the provider once for all seats, and write down what they have cost since."""
        course = self.staff.course()
        listed = course.provider.servers()
        metering.accrue(self.staff.folder, course, listed)
        there = {one.lab_id: one for one in listed if one.state not in ENDED}
        return Look(at=self.now(), servers=there)

    def roster(self) -> None:
        """Who has left the course gets in no longer, and lets their server go."""
        folder = self.staff.folder
        self._read_again()
        active = {one.id for one in folder.students()}
        gone = [one for one in self.keys.students() if one not in active]
        for student in self.keys.expel(gone) if gone else []:
            self.tell(student, "has left the course: the key opens nothing any more")
        for desk in self.desk.seats():
            here = {one.student for one in desk.claims if not one.leaving}
            left = {
                one
                for one in here
                if one not in active or folder.seat_of(one).name != desk.seat.name
            }
            if left:
                desk.leave_all(tuple(left))

    def _read_again(self) -> None:
        """Take over course.yaml and the roster where they changed, but only whole ones."""
        folder = self.staff.folder
        seen = tuple(
            path.stat().st_mtime_ns if path.exists() else 0
            for path in (folder.config.path, folder.roster_file)
        )
        if seen == self._seen:
            return
        fresh = open_course(folder.path)
        fresh.config, fresh.students()  # a ConfigError leaves all as it was
        folder.refresh()
        if self._seen:
            self.tell("", "course.yaml and the roster are read again")
        self._seen = seen

    def hours(self, look: Look) -> None:
        """Servers for everybody before class; unused ones go after it."""
        config = self.staff.folder.config
        current, lesson = phase(config.hours, config.term, self.now())
        if current != "off" and lesson is not None:
            self._prepare(look, lesson)
            return
        over = just_ended(config.hours, config.term, self.now(), AFTER_CLASS_S)
        if over is not None:
            self._clear(look, self.now() - over.ends)

    def sweep(self, look: Look) -> None:
        """Warn whose budget goes to its end; end what outlives its budget, its time, its owner."""
        folder = self.staff.folder
        entries = folder.ledger.entries()
        spent = spending(entries, self.now(), folder.living(look.servers.values()))
        lines: dict[str, list[Entry]] = defaultdict(list)
        for one in entries:
            lines[one.seat].append(one)
        for seat in folder.seats(active_only=False, former=True):
            own = lines[seat.name]
            allowance = allowance_usd(own, seat.name, folder.config.per_student.budget)
            usd = spent[seat.name].usd if seat.name in spent else 0.0
            server = look.servers.get(seat.lab_id)
            if allowance is not None:
                self._warn(seat, own, usd, allowance, server)
            if server is None:
                continue
            rescued = self._rescue(seat, server, usd, allowance)
            if why := self._over(seat, own, usd, allowance, server):
                if not rescued:
                    self._apart(seat.name, partial(self._end, seat, why))
                # Whoever brings the results home, it does not take for ever.
                since = self._over_since.setdefault(server.id, self.now())
                if self.now() - since > SAVE_S:
                    self._apart(f"{seat.name} late", partial(self._cut, seat, server))
        self._settled()
        for desk in self.desk.seats():
            if (server := desk.server) is not None and server.created_at < look.at - YOUNG_S:
                desk.seen(server, look.servers.get(desk.seat.lab_id))
            desk.go_on()

    def disks(self) -> None:
        """Remove seats' kept disks whose time is over."""
        remove_expired_disks(self.staff)

    def watch(self) -> None:
        """Ask every server how it is: for idle hours, and for whoever looks at the dashboard."""
        there = {one.lab_id for one in self.staff.state.servers() if one.state == "running"}
        seats = [one for one in self.staff.folder.seats() if one.lab_id in there]
        if seats:
            status(self.staff, seats, refresh=True)

    def _rescue(self, seat: Seat, server: Server, usd: float, allowance: float | None) -> bool:
        """Whether the server's results are brought home at its end: from now on, where it is near.

        The round does not wait for that. A watchdog that says nothing is measured by the ledger.
        """
        going = self._rescues.get(seat.name)
        if going is not None and going.is_alive():
            return True
        if server.state != "running":
            return False
        price = server.offer.price_usd_per_hour
        left_s = inf
        if allowance is not None and price > 0:
            left_s = (allowance - usd) / price * 3600 - SAVER_S
        if not rescue.is_near_end(self.staff.state, server, self.now(), left_s):
            return False

        def save() -> None:
            limit = rescue.await_end(ground_of(self.staff, seat), self._recorded(server))
            if limit is not None:
                with self._turns:
                    self._end(seat, limit)

        self._rescues[seat.name] = threading.Thread(target=save, name="seat-rescue", daemon=True)
        self._rescues[seat.name].start()
        return True

    def _recorded(self, server: Server) -> Server:
        """The server with the way and the keys that are on record: a provider shows neither."""
        return self.staff.state.server(server.id) or server

    def _prepare(self, look: Look, lesson: Lesson) -> None:
        """Whoever puts a server down in class does not get it again unasked; who loses it does."""
        last: dict[str, Entry] = {}
        for one in self.staff.folder.ledger.entries():
            if one.kind in ("up", "down") and one.at >= lesson.warm:
                last[one.seat] = one
        wanted = [
            seat
            for seat in self.staff.folder.seats()
            if seat.lab_id not in look.servers
            and (seat.name not in last or last[seat.name].why.startswith(metering.UNSEEN))
        ]
        if not wanted:
            return
        self.tell("", f"class is near: servers for {len(wanted)}")
        for outcome in servers.up(self.staff, wanted):
            if outcome.error:
                self.tell(outcome.seat, ": ".join(filter(None, [outcome.error, outcome.why])))

    def _clear(self, look: Look, since_s: float) -> None:
        for seat in self.staff.folder.seats():
            server = look.servers.get(seat.lab_id)
            if server is None or server.state != "running":
                continue
            held = any(not one.leaving for one in self.desk.seat(seat).claims)
            if held and since_s < IDLE_AFTER_CLASS_S:
                continue
            self._apart(seat.name, partial(self._end_unused, seat, server))
        self._settled()

    def _end_unused(self, seat: Seat, server: Server) -> None:
        if not self._busy(seat, server):
            self._end(seat, "class")

    def _apart(self, name: str, deed: Callable[[], None]) -> None:
        """Do it in a thread of its own, one at a time for each name: a student is root on their
        server, which may never answer or answer nonsense, and that is to keep nobody else's from
        its end."""
        if (going := self._going.get(name)) is not None and going.is_alive():
            return

        def run() -> None:
            with self._turns:
                try:
                    deed()
                except Exception as error:
                    self.tell(name, as_lab_error(error, partial(self.tell, name)).what)

        self._going[name] = threading.Thread(target=run, name="seat-end", daemon=True)
        self._going[name].start()

    def _settled(self) -> None:
        """Wait for what was begun, but not for ever."""
        end = time.monotonic() + PATIENCE_S
        for one in self._going.values():
            one.join(max(0.0, end - time.monotonic()))
        self._going = {name: one for name, one in self._going.items() if one.is_alive()}

    def _busy(self, seat: Seat, server: Server) -> bool:
        """Whether somebody or something works there; yes where that cannot be told."""
        try:
            told = guard.watch(ground_of(self.staff, seat), self._recorded(server))
        except LabError:
            return True
        return not told or bool(told.get("busy"))

    def _warn(
        self,
        seat: Seat,
        own: Iterable[Entry],
        usd: float,
        allowance: float,
        server: Server | None,
    ) -> None:
        """Once for each step, and again where the budget was changed since."""
        share = 100 * usd / allowance if allowance > 0 else 100.0 if usd > 0 else 0.0
        step = next((one for one in WARN_AT if share >= one), 0)
        if not step:
            return
        told = [one.detail for one in own if one.kind == "warned"]
        if any(
            float(one.get("percent", 0)) >= step and one.get("allowance_usd") == round(allowance, 2)
            for one in told
        ):
            return
        text = _words(step, usd, allowance)
        self.staff.folder.ledger.append(
            "warned",
            seat=seat.name,
            by="keeper",
            why=text,
            percent=step,
            allowance_usd=round(allowance, 2),
        )
        self.tell(seat.name, text)
        if server is not None and server.state == "running":
            self._apart(seat.name, partial(self._show, seat, text))

    def _show(self, seat: Seat, text: str) -> None:
        try:
            broadcast.message(self.staff, [seat], text)
        except LabError as error:
            self.tell(seat.name, f"could not be told on the server: {error.what}")

    def _over(
        self,
        seat: Seat,
        own: list[Entry],
        usd: float,
        allowance: float | None,
        server: Server,
    ) -> Reason | Literal[""]:
        """Why the seat's server has to go by now."""
        if not any(one.active for one in map(self.staff.folder.student, seat.students)):
            return "left"
        if server.state == "stopped":
            return ""
        if allowance is not None and usd >= allowance and server.offer.price_usd_per_hour:
            warned = [one.at for one in own if one.kind == "warned" and _full(one, allowance)]
            if warned and self.now() - warned[-1] > GRACE_S:
                return "budget"
        longest = self.staff.folder.config.per_student.max_ttl + granted_s(own)
        if server.offer.price_usd_per_hour and (self.now() > server.created_at + longest + GRACE_S):
            return "time"
        return ""

    def _cut(self, seat: Seat, server: Server) -> None:
        """Whoever has results come home without end, by their own hand or the link's, lives on no
        longer: compute ends at the provider, and the disk stays where it can."""
        late = LabError(f"in {SAVE_S / 60:.0f} minutes not everything on it came home")
        try:
            told: LabError = down.kept_there(ground_of(self.staff, seat), server, late)
        except LabError as error:
            told = error
        self.tell(seat.name, f"{told.what}: " + "; ".join(told.why.splitlines()))

    def _end(self, seat: Seat, why: Reason) -> None:
        """Everything home, then the end; told where that fails, and tried again."""
        words = {
            "budget": "its budget is used up",
            "time": "its time is over",
            "left": "its students left the course or changed teams",
            "class": "class is over and nothing runs there",
        }
        self.tell(seat.name, f"its server is ended: {words[why]}")
        try:
            outcomes = teardown.down(replace(self.staff, why=words[why]), [seat])
        except LabError as error:
            self.tell(seat.name, ": ".join(filter(None, [error.what, error.why])))
            return
        for one in outcomes:
            if one.error:
                self.tell(seat.name, ": ".join(filter(None, [one.error, one.why])))


def _full(entry: Entry, allowance: float) -> bool:
    same = entry.detail.get("allowance_usd") == round(allowance, 2)
    return same and float(entry.detail.get("percent", 0)) >= 100


def _words(step: int, usd: float, allowance: float) -> str:
    said = f"{usd:.2f} of {allowance:.2f} dollars are spent ({step}%)"
    if step < 100:
        return said
    return f"{said}: save a checkpoint now, the server ends within {GRACE_S / 60:.0f} minutes"

"""What the keeper does for a seat that a student holds: the course's own flows, one seat at a time.

A server on which students are root is made only where its provider ends it by itself at its time,
or where it costs nothing: the watchdog on the machine is advice to somebody who is root there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from labctl.config import CourseConfig
from labctl.courses import metering, server_contents
from labctl.courses.claims import LOOK_S, Claim
from labctl.courses.context import granted_s, seat_grounds
from labctl.courses.records.folder import Seat
from labctl.courses.records.ledger import Entry
from labctl.courses.records.spending import allowance_usd, spent_usd
from labctl.courses.servers import ENDED, Staff, up
from labctl.errors import LabError, PolicyError, ProviderError
from labctl.lifecycle import extend as more_time
from labctl.model import Offer, Server, Value
from labctl.providers import Deadline, Provider
from labctl.servers import accounts, end_server
from labctl.servers.context import Ground

SCRIPT_S = 60.0
COMMENT = "labctl-student"
# Replaces every student's line by those on standard input; the keeper's own stays.
LET_IN = f"""umask 077; mkdir -p "$HOME/.ssh"; f="$HOME/.ssh/authorized_keys"; n="$f.labctl-$$"
[ -e "$f" ] || : > "$f"
grep -v ' {COMMENT}$' "$f" > "$n"
cat >> "$n" && mv -f "$n" "$f"
"""
OFFERS_S = 60.0
NOT_HANDED_OUT = "it could not be handed out"


@dataclass(frozen=True)
class KeeperStaff(Staff):
    """Staff whose course's ground is made once for each course.yaml: all threads of a keeper share
    its provider, and so the locks of whatever the seats have in common."""

    _made: list[tuple[CourseConfig, Ground]] = field(default_factory=list, repr=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def course(self, *, everywhere: bool = False, plain: bool = False) -> Ground:
        if everywhere or plain:
            return super().course(everywhere=everywhere, plain=plain)
        config = self.folder.config
        with self._guard:
            if not self._made or self._made[0][0] is not config:
                self._made[:] = [(config, super().course())]
            return self._made[0][1]


class Money(Value, frozen=True):
    """A seat's dollars: what it may spend in all (None: no limit), and has spent."""

    allowance_usd: float | None
    spent_usd: float

    @property
    def left_usd(self) -> float | None:
        return None if self.allowance_usd is None else self.allowance_usd - self.spent_usd


@dataclass
class SeatWork:
    """`Work` on servers of a student's own. `login_only` prepares nothing there."""

    staff: Staff
    login_only: bool = False
    _offers: tuple[float, list[Offer]] = (0.0, [])
    _listed: tuple[float, dict[str, Server]] = (0.0, {})
    _listing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _new: dict[str, str] = field(default_factory=dict, repr=False)
    _extending: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def check(self, seat: Seat) -> None:
        """PolicyError where the seat may have no server now, before anything is asked for."""
        money = self.money(seat)
        left = money.left_usd
        if left is not None and left <= 0 and self._costs(seat):
            raise PolicyError(
                "your budget is used up",
                why=f"{money.spent_usd:.2f} of {money.allowance_usd or 0:.2f} dollars are spent",
                hint="ask your instructor: labctl course budget",
            )
        if self._owned and (lack := no_deadline(self._provider)) and self._costs(seat):
            raise PolicyError(
                "this course gives no servers of one's own",
                why=lack,
                hint="tell your instructor: labctl course check",
            )

    def offers(self, seat: Seat) -> list[Offer]:
        """The server that the seat has, else what the course's provider has for it.

        A provider that has nothing left for others need not be asked about what is the seat's.
        """
        own = self._list().get(seat.lab_id)
        return self._others() if own is None else [own.offer]

    def _list(self) -> dict[str, Server]:
        """The seats' servers by lab id, as the provider was asked some seconds ago."""
        with self._listing:
            at, servers = self._listed
            if not at or time.monotonic() - at > LOOK_S:
                listed = self._provider.servers()
                servers = {one.lab_id: one for one in listed if one.state not in ENDED}
                self._listed = (time.monotonic(), servers)
            return servers

    def _others(self) -> list[Offer]:
        """What the provider has for one more seat, as it was asked within the last minute."""
        at, found = self._offers
        if not at or time.monotonic() - at > OFFERS_S:
            need = self.staff.folder.config.lab.server.need
            most = need.max_price_usd_per_hour
            found = [
                one
                for one in self._provider.offers(need)
                if most is None or one.price_usd_per_hour <= most
            ]
            self._offers = (time.monotonic(), found)
        return found

    def money(self, seat: Seat) -> Money:
        """From the ledger, as its last lines say."""
        entries = self.staff.folder.ledger.entries()
        budget = self.staff.folder.config.per_student.budget
        return Money(
            allowance_usd=allowance_usd(entries, seat.name, budget),
            spent_usd=spent_usd(entries, seat.name, time.time()),
        )

    def make(self, seat: Seat) -> Server:
        (outcome,) = up(self.staff, [seat], login_only=self.login_only)
        if outcome.server is None or outcome.error:
            if outcome.server is not None and outcome.made:
                self._take_away(seat, outcome.server)  # nobody was let in, and it would go on
            raise ProviderError(
                outcome.error, why=outcome.why, hint="labctl up   # again, or tell your instructor"
            )
        if outcome.made:
            self._new[seat.name] = outcome.server.id
        return self._limited(seat, outcome.server, made=outcome.made)

    def let_in(self, seat: Seat, server: Server, claims: tuple[Claim, ...]) -> Server:
        """One that was made for these, and lets nobody in, is taken away again."""
        try:
            self._let_in(seat, server, claims)
        except LabError:
            if self._new.pop(seat.name, "") == server.id:
                self._take_away(seat, server)
            raise
        self._new.pop(seat.name, None)
        return server

    def _let_in(self, seat: Seat, server: Server, claims: tuple[Claim, ...]) -> None:
        lines = {" ".join([*one.public_key.split()[:2], COMMENT]) for one in claims}
        body = "".join(f"{line}\n" for line in sorted(lines))
        transport = self._ground(seat).connections.reopen(server)
        transport.run(LET_IN, stdin=body.encode(), timeout_s=SCRIPT_S)

    def look(self, seat: Seat, server: Server) -> Server | None:
        found = self._provider.find(server.id)
        try:
            gone = found is None and accounts.is_gone(self._course, server)
        except PolicyError:
            return server  # the keeper asks another account, which cannot know: its rounds say so
        return None if gone else found or server

    def end(self, seat: Seat, server: Server) -> None:
        """PolicyError where not everything could be brought home: compute ends, the disk stays."""
        ground = self._ground(seat)
        with (
            ground.state.exclusive(ground.lab_id, "course down"),
            metering.write_ends(ground.state, [seat]),
        ):
            if self._provider.find(server.id) is not None and not self.login_only:
                server_contents.save(ground, server, discard=False)
            end_server.remove(ground, server)
            metering.ended(
                self.staff.folder, [(seat, server)], "keeper", "labctl down", metering.HOME
            )

    def extend(self, seat: Seat, server: Server, span_s: int, by: str) -> None:
        """PolicyError beyond the course's longest life or the seat's budget, written down too."""
        ground = self._ground(seat)
        need, ledger = ground.config.server.need, self.staff.folder.ledger
        with self._extending:  # written down before it is given: two at once are two
            own = ledger.entries(seat=seat.name)
            whole_s = (need.ttl_s or 0) + granted_s(own) + _extended_s(own) + span_s
            if need.max_ttl_s and whole_s > need.max_ttl_s:
                hours = need.max_ttl_s / 3600
                raise PolicyError(
                    f"no {span_s / 3600:g} h more",
                    why=f"a server of this course lives {hours:g} h at most",
                    hint="ask your instructor: labctl course extend",
                )
            # Without `seconds`, which would move the ceiling itself.
            ledger.append("extend", seat=seat.name, student=by, by=by, span_s=span_s)
        try:
            more_time.extend(ground, span_s, latest_at=server.created_at + whole_s)
        except LabError:
            ledger.append(
                "extend", seat=seat.name, student=by, by=by, why="refused", span_s=-span_s
            )
            raise

    def _limited(self, seat: Seat, server: Server, *, made: bool) -> Server:
        """The server with the time at which its provider ends it; a new one without is taken away,
        and one that staff has made is not handed out."""
        if not (self._owned and server.offer.price_usd_per_hour):
            return server
        state = self.staff.state
        said = state.events(server_id=server.id, kind="deadline", limit=1)
        at = server.deadline_at or (float(said[0].detail.get("at") or 0.0) if said else 0.0)
        if at > 0:
            return msgspec.structs.replace(server, deadline_at=at)
        if made:
            self._take_away(seat, server)
        raise ProviderError(
            "the server was taken away again" if made else "the server cannot be handed out",
            why="nothing at its provider would end it at its time",
            hint="tell your instructor: the keeper's account may not set that timer",
        )

    def _take_away(self, seat: Seat, server: Server) -> None:
        with metering.write_ends(self.staff.state, [seat]):
            end_server.remove(self._ground(seat), server)
            metering.ended(self.staff.folder, [(seat, server)], "keeper", NOT_HANDED_OUT)

    def _costs(self, seat: Seat) -> bool:
        """Whether anything that the seat may have costs anything."""
        return any(one.price_usd_per_hour for one in self.offers(seat))

    def _ground(self, seat: Seat) -> Ground:
        staff = self.staff
        (ground,) = seat_grounds(
            staff.folder, staff.paths, staff.state, staff.reporter, [seat], course=self._course
        )
        return ground

    @property
    def _owned(self) -> bool:
        """Whether students are root on what they get: not with an account on a shared server."""
        return self.staff.folder.config.shared is None

    @property
    def _provider(self) -> Provider:
        return self._course.provider

    @property
    def _course(self) -> Ground:
        return self.staff.course()


def no_deadline(provider: Provider) -> str:
    """Why nothing at the provider would end a server at its time; "" where something would."""
    if not isinstance(provider, Deadline):
        return f"{provider.name} cannot end a server by itself at its time"
    lack = provider.deadline_lacks
    return f"nothing at {provider.name} would end it at its time: {lack}" if lack else ""


def _extended_s(entries: Iterable[Entry]) -> int:
    """Seconds that students have given the seat's present server within the limits."""
    total = 0
    for one in entries:
        if one.kind == "up":
            total = 0
        elif one.kind == "extend":
            total += int(one.detail.get("span_s", 0))
    return total

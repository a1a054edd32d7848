"""The keeper's work for a seat that a student has claimed: the course's own flows, for one seat.

A server on which students are root is created only if its provider ends it by itself at its
deadline, or if it is free: the watchdog on a machine does not bind somebody who is root there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from labctl.config import CourseConfig
from labctl.courses import metering, server_contents
from labctl.courses.claims import FRESH_S
from labctl.courses.context import build_seat_contexts, sum_staff_extensions_s
from labctl.courses.records.folder import Seat
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.spending import allowance_usd, spent_usd
from labctl.courses.seat_claims import SeatClaim
from labctl.courses.seat_ends import describe_stop
from labctl.courses.servers import ENDED, CourseOperator, bring_up_servers
from labctl.errors import LabError, PolicyError, ProviderError
from labctl.errors.subject import LAB
from labctl.lifecycle import extend as more_time
from labctl.model import Offer, Server, Value
from labctl.providers import Provider
from labctl.servers import accounts, end_server
from labctl.servers.context import LabContext
from labctl.servers.deadlines import explain_missing_timer
from labctl.servers.offers import filter_by_type
from labctl.servers.open_costs import describe_open_costs
from labctl.text import dollars_text, duration_text
from labctl.wire.keeper import SeatEndRecord

SCRIPT_S = 60.0
COMMENT = "labctl-student"
# Replaces all students' lines with those on standard input; the keeper's own line stays.
LET_IN = f"""umask 077; mkdir -p "$HOME/.ssh"; f="$HOME/.ssh/authorized_keys"; n="$f.labctl-$$"
[ -e "$f" ] || : > "$f"
grep -v ' {COMMENT}$' "$f" > "$n"
cat >> "$n" && mv -f "$n" "$f"
"""
OFFERS_S = 60.0
REMOVED = "the server was removed again"
NOT_HANDED_OUT = "it could not be handed out"


@dataclass(frozen=True)
class CachingCourseOperator(CourseOperator):
    """A course operator that builds the course's context once for each version of course.yaml.

    All threads of a keeper share its provider, and so the locks on what the seats have in common.
    """

    _cached: list[tuple[CourseConfig, LabContext]] = field(default_factory=list, repr=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def course(
        self, *, everywhere: bool = False, plain: bool = False, uses_baked_image: bool = True
    ) -> LabContext:
        if everywhere or plain or not uses_baked_image:
            return super().course(
                everywhere=everywhere, plain=plain, uses_baked_image=uses_baked_image
            )
        config = self.folder.config
        with self._guard:
            if not self._cached or self._cached[0][0] is not config:
                self._cached[:] = [(config, super().course())]
            return self._cached[0][1]


class SeatMoney(Value, frozen=True):
    """A seat's dollars: its total allowance (None: no limit), and what it has spent."""

    allowance_usd: float | None
    spent_usd: float

    @property
    def left_usd(self) -> float | None:
        return None if self.allowance_usd is None else self.allowance_usd - self.spent_usd


@dataclass
class SeatOperations:
    """`SeatActions` for servers that students have to themselves.

    `login_only` prepares nothing there.
    """

    staff: CourseOperator
    login_only: bool = False
    _offers: tuple[float, list[Offer]] = (0.0, [])
    _listed: tuple[float, dict[str, Server]] = (0.0, {})
    _listing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _new: dict[str, str] = field(default_factory=dict, repr=False)
    _extending: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def check(self, seat: Seat) -> None:
        """Raise PolicyError if the seat must not get a server now."""
        money = self.money(seat)
        left_usd = money.left_usd
        if left_usd is not None and left_usd <= 0 and self._has_price(seat):
            raise PolicyError(
                "your budget is used up",
                why=f"you have spent {dollars_text(money.spent_usd)} "
                f"of {dollars_text(money.allowance_usd or 0)}",
                hint=f"ask your instructor, who can type:\nlabctl course budget {seat.name} +5",
            )
        if (
            self._is_root
            and (lack := explain_missing_timer(self._provider))
            and self._has_price(seat)
        ):
            raise PolicyError(
                "this course cannot give students servers of their own",
                why=lack,
                hint="tell your instructor, who can type:\nlabctl course check",
            )

    def offers(self, seat: Seat) -> list[Offer]:
        """Return the offer of the seat's present server, else the provider's offers.

        A seat that has a server keeps it even when the provider has nothing left.
        """
        own = self._list_servers().get(seat.lab_id)
        return self._list_offers() if own is None else [own.offer]

    def _list_servers(self) -> dict[str, Server]:
        """Return the seats' servers by lab id, from the provider or at most FRESH_S seconds old."""
        with self._listing:
            at, servers = self._listed
            if not at or time.monotonic() - at > FRESH_S:
                listed = self._provider.servers()
                servers = {server.lab_id: server for server in listed if server.state not in ENDED}
                self._listed = (time.monotonic(), servers)
            return servers

    def _list_offers(self) -> list[Offer]:
        """Return the provider's offers for one more seat, at most OFFERS_S seconds old."""
        at, offers = self._offers
        if not at or time.monotonic() - at > OFFERS_S:
            need = self.staff.folder.config.lab.server.need
            most = need.max_price_usd_per_hour
            offers = [
                offer
                for offer in filter_by_type(self._provider.offers(need), need)
                if most is None or offer.price_usd_per_hour <= most
            ]
            self._offers = (time.monotonic(), offers)
        return offers

    def money(self, seat: Seat) -> SeatMoney:
        """Return the seat's allowance and spending, from the ledger."""
        entries = self.staff.folder.ledger.list_entries()
        budget = self.staff.folder.config.per_student.budget
        return SeatMoney(
            allowance_usd=allowance_usd(entries, seat.name, budget),
            spent_usd=spent_usd(entries, seat.name, time.time()),
        )

    def create_server(self, seat: Seat) -> Server:
        (outcome,) = bring_up_servers(
            self.staff, [seat], login_only=self.login_only, explains_costs=False
        )
        if outcome.server is None or outcome.error:
            if outcome.server is not None and outcome.made:
                # Nobody can log in, and it would keep running.
                self._remove_server(seat, outcome.server)
                rest = [REMOVED]
            else:
                rest = describe_open_costs(self._context(seat), seat.lab_id)
            raise ProviderError(
                outcome.error,
                why="\n".join(filter(None, [outcome.why, *rest])),
                hint="labctl up   # again, or tell your instructor",
            )
        if outcome.made:
            self._new[seat.name] = outcome.server.id
        return self._require_deadline(seat, outcome.server, made=outcome.made)

    def authorize_keys(self, seat: Seat, server: Server, claims: tuple[SeatClaim, ...]) -> Server:
        """Authorize the claims' keys. A new server on which that fails is removed again."""
        try:
            self._write_keys(seat, server, claims)
        except LabError:
            if self._new.pop(seat.name, "") == server.id:
                self._remove_server(seat, server)
            raise
        self._new.pop(seat.name, None)
        return server

    def _write_keys(self, seat: Seat, server: Server, claims: tuple[SeatClaim, ...]) -> None:
        lines = {" ".join([*claim.public_key.split()[:2], COMMENT]) for claim in claims}
        body = "".join(f"{line}\n" for line in sorted(lines))
        transport = self._context(seat).connections.reopen(server)
        transport.run(LET_IN, stdin=body.encode(), timeout_s=SCRIPT_S)

    def check_server(self, seat: Seat, server: Server) -> Server | None:
        listed = self._provider.find(server.id)
        try:
            is_gone = listed is None and accounts.is_gone(self._course, server)
        except PolicyError:
            return server  # another account answered, which cannot know: the sweep reports it
        return None if is_gone else listed or server

    def explain_stop(self, seat: Seat) -> SeatEndRecord | None:
        recorded = self.staff.state.get_lab_server(seat.lab_id)
        listed = self._provider.find(recorded.id) if recorded else None
        if listed is None or listed.state != "stopped":
            return None
        return describe_stop(self.staff.state, listed.id)

    def save_and_remove_server(self, seat: Seat, server: Server) -> None:
        """Save and end the seat's server.

        PolicyError if not everything could be saved: compute ends then, and the disk stays.
        """
        context = self._context(seat)
        with (
            context.state.lock(context.lab_id, "course down"),
            metering.hold_end_locks(context.state, [seat]),
        ):
            if self._provider.find(server.id) is not None and not self.login_only:
                # The student's `labctl down` has just offered them the files of the home directory.
                server_contents.save_server(context, server, discard=False, saves_home=False)
            end_server.remove(context, server)
            metering.record_ends(
                self.staff.folder, [(seat, server)], "keeper", "labctl down", metering.HOME
            )

    def extend(self, seat: Seat, server: Server, span_s: int, by: str) -> None:
        """Give a server `span_s` more seconds, recorded in the ledger.

        PolicyError beyond the course's maximum lifetime or the seat's budget.
        """
        context = self._context(seat)
        need, ledger = context.config.server.need, self.staff.folder.ledger
        with self._extending:  # recorded before it is granted, so that two at once both count
            entries = ledger.list_entries(seat=seat.name)
            whole_s = (
                (need.ttl_s or 0) + sum_staff_extensions_s(entries) + _extended_s(entries) + span_s
            )
            if need.max_ttl_s and whole_s > need.max_ttl_s:
                raise PolicyError(
                    f"cannot extend by {duration_text(span_s)}",
                    why=f"servers of this course run for at most {duration_text(need.max_ttl_s)}",
                    hint=f"ask your instructor, who can type:\nlabctl course extend {seat.name} 2h",
                )
            # Without `seconds`, which would raise the ceiling itself.
            ledger.append("extend", seat=seat.name, student=by, by=by, span_s=span_s)
        try:
            more_time.extend(context, span_s, latest_at=server.created_at + whole_s)
        except LabError:
            ledger.append(
                "extend", seat=seat.name, student=by, by=by, why="refused", span_s=-span_s
            )
            raise

    def _require_deadline(self, seat: Seat, server: Server, *, made: bool) -> Server:
        """Return the server with the deadline at which its provider ends it.

        Raises ProviderError without one: a new server is removed then, one that staff created is
        not given to the student.
        """
        if not (self._is_root and server.offer.price_usd_per_hour):
            return server
        state = self.staff.state
        events = state.list_events(server_id=server.id, kind="deadline", limit=1)
        at = server.deadline_at or (float(events[0].detail.get("at") or 0.0) if events else 0.0)
        if at > 0:
            return msgspec.structs.replace(server, deadline_at=at)
        if made:
            self._remove_server(seat, server)
        raise ProviderError(
            REMOVED if made else "the server cannot be given to you",
            why="its provider would not end it at its deadline",
            hint="tell your instructor: the keeper's account must be allowed to set that timer",
        )

    def _remove_server(self, seat: Seat, server: Server) -> None:
        with metering.hold_end_locks(self.staff.state, [seat]):
            end_server.remove(self._context(seat), server)
            metering.record_ends(self.staff.folder, [(seat, server)], "keeper", NOT_HANDED_OUT)

    def _has_price(self, seat: Seat) -> bool:
        """Tell whether any of the seat's offers costs money."""
        return any(offer.price_usd_per_hour for offer in self.offers(seat))

    def _context(self, seat: Seat) -> LabContext:
        staff = self.staff
        (context,) = build_seat_contexts(
            staff.folder, staff.paths, staff.state, staff.reporter, [seat], course=self._course
        )
        # Its errors go to the student, who types the commands of a lab.
        return context.make_sibling(context.config, context.lab_id, subject=LAB)

    @property
    def _is_root(self) -> bool:
        """Whether students are root on their server: not with an account on a shared one."""
        return self.staff.folder.config.shared is None

    @property
    def _provider(self) -> Provider:
        return self._course.provider

    @property
    def _course(self) -> LabContext:
        return self.staff.course()


def _extended_s(entries: Iterable[CourseLedgerEntry]) -> int:
    """Return the seconds by which students have extended the seat's present server."""
    total = 0
    for entry in entries:
        if entry.kind == "up":
            total = 0
        elif entry.kind == "extend":
            total += int(entry.detail.get("span_s", 0))
    return total

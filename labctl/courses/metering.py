"""Metering: what seats have cost since the last snapshot, written into the course's ledger.

Only what a provider has just shown counts as running. A server that the ledger does not know is
priced from its tags, so that a lost ledger does not reset anybody's budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from labctl.courses.context import OWN, build_own_seat
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.courses.records.ledger_servers import UNSEEN, LedgerServer, read_servers, up_line
from labctl.errors import BusyError
from labctl.model import Server
from labctl.servers import accounts
from labctl.servers.context import LabContext
from labctl.state import State

HOUR_S = 3600.0
# Seconds of cost that one ledger line covers at least: this way a class of 300 writes 100,000 lines
# in a term, instead of ten times as many with a line a minute. Sums include the time since the last
# line.
LEAST_S = 600.0
# Seconds to wait for one seat's lock: longer than `_is_ending` holds it.
SEAT_LOCK_S = 0.2
# Seconds to wait for all seats together: another process that ends a class holds every lock.
ALL_LOCKS_S = 2.0
HOME, DISK = "home", "disk"
WATCHDOG_WORDS = {
    "budget": "its budget was used up",
    "ttl": "its time was over",
    "idle": "nothing ran there",
}
# Seconds for which a new server that is missing from the list may just not be listed yet.
YOUNG_S = 60.0


@dataclass(frozen=True)
class ServerSnapshot:
    """A snapshot of a course's servers at time `at`, with the reports of their watchdogs.

    `idle_s` is a server's idle time since it was created, if a watchdog reported it. `confirmed`
    are missing servers that the provider says have ended. `endings` says why watchdogs were ending
    servers. `in_progress` are servers that another process is ending now; it records their end.
    """

    at: float
    servers: Sequence[Server]
    idle_s: dict[str, float] = field(default_factory=dict)
    settle_s: float = YOUNG_S
    provider: str = ""
    account: str = ""
    confirmed: frozenset[str] = frozenset()
    endings: dict[str, str] = field(default_factory=dict)
    in_progress: frozenset[str] = frozenset()


def record_costs(
    folder: CourseFolder, course: LabContext, listed: Iterable[Server]
) -> list[CourseLedgerEntry]:
    """Record what every server of the course has cost until now, and which have ended unseen.

    `listed` is everything that the provider shows now. Returns the lines written, none if nothing
    has changed. PolicyError if a server of the course is in another account; nothing is written
    then.
    """
    servers = list(listed)
    seats = [
        *folder.list_seats(active_only=False, former=True),
        *(build_own_seat(folder, purpose) for purpose in OWN),
    ]
    in_progress = _find_ends_in_progress(folder, course, seats, servers)
    # Read after that check, so that an end recorded meanwhile is not recorded twice.
    entries = folder.ledger.list_entries()
    before = list_open_servers(entries, course)
    require_same_account(course, before, {seat.lab_id for seat in seats})
    snapshot = ServerSnapshot(
        at=time.time(),
        servers=servers,
        idle_s=_read_idle_s(course, servers),
        settle_s=max(YOUNG_S, course.provider.settle_s),
        provider=course.provider.name,
        account=course.provider.get_account().id,
        confirmed=_find_confirmed(course, before, {server.id for server in servers}),
        endings=_read_endings(course, entries, servers),
        in_progress=in_progress,
    )
    return folder.ledger.append_all(draft_lines(entries, seats, snapshot))


@contextmanager
def hold_end_locks(state: State, seats: Iterable[Seat]) -> Iterator[None]:
    """Hold the right to record how the servers of these seats end.

    Meanwhile no other process records such an end as unseen. The locks end with the process.
    """
    give_up_at = time.monotonic() + ALL_LOCKS_S
    with ExitStack() as locks:
        for seat in seats:
            wait_s = max(0.0, min(SEAT_LOCK_S, give_up_at - time.monotonic()))
            with suppress(BusyError):  # another process is ending it too; its lock serves both
                locks.enter_context(state.lock(_end_lock(seat), "course down", wait_s=wait_s))
        yield


def _find_ends_in_progress(
    folder: CourseFolder, course: LabContext, seats: Iterable[Seat], servers: Iterable[Server]
) -> frozenset[str]:
    """Return the vanished servers whose end another process is about to record."""
    by_name = {seat.name: seat for seat in seats}
    listed_ids = {server.id for server in servers if server.state not in accounts.ENDED}
    vanished = {
        server_id: by_name[server.seat]
        for server_id, server in list_open_servers(folder.ledger.list_entries(), course).items()
        if server_id not in listed_ids and server.seat in by_name
    }
    return frozenset(
        server_id for server_id, seat in vanished.items() if _is_ending(course.state, seat)
    )


def _is_ending(state: State, seat: Seat) -> bool:
    try:
        with state.lock(_end_lock(seat), "metering", wait_s=0.0):
            return False
    except BusyError:
        return True


def _end_lock(seat: Seat) -> str:
    return f"{seat.lab_id}-end"


def list_open_servers(
    entries: Iterable[CourseLedgerEntry], course: LabContext
) -> dict[str, LedgerServer]:
    """Return the servers at the course's provider without an end in the ledger, by id."""
    own = ("", course.provider.name)
    return {
        server_id: server
        for server_id, server in read_servers(entries).items()
        if not server.ended and server.provider in own
    }


def require_same_account(
    course: LabContext, servers: dict[str, LedgerServer], lab_ids: set[str]
) -> None:
    """Raise PolicyError if one of these servers, or of the recorded ones, is in another account."""
    command = "labctl course status --refresh"
    accounts.require_same_account(
        course,
        [server for server in course.state.list_servers() if server.lab_id in lab_ids],
        [attempt for attempt in course.state.list_open_attempts() if attempt.lab_id in lab_ids],
        command=command,
    )
    for server_id, server in servers.items():
        if accounts.is_elsewhere(course, server.account):
            subject = f"the server {server_id} of {server.seat}"
            raise accounts.make_refusal(course, server.account, subject, server.price, command)


def _find_confirmed(
    course: LabContext, servers: dict[str, LedgerServer], listed_ids: set[str]
) -> frozenset[str]:
    """Return the missing servers without an account that the provider confirms as ended."""
    doubtful = [
        server_id
        for server_id, server in servers.items()
        if server_id not in listed_ids
        and not accounts.is_attributed(course, server.account, costs=bool(server.price))
    ]
    answers = {server_id: course.provider.find(server_id) for server_id in doubtful}
    return frozenset(
        server_id
        for server_id, current in answers.items()
        if current and current.state in accounts.ENDED
    )


def draft_lines(
    entries: Iterable[CourseLedgerEntry], seats: Iterable[Seat], snapshot: ServerSnapshot
) -> list[CourseLedgerDraft]:
    """Return the lines that a snapshot adds to the ledger; pure."""
    names = {seat.lab_id: seat.name for seat in seats}
    servers = read_servers(entries)
    drafts: list[CourseLedgerDraft] = []
    listed_ids = set()
    for server in snapshot.servers:
        seat = names.get(server.lab_id)
        if seat is None or server.state in accounts.ENDED:
            continue
        listed_ids.add(server.id)
        before = servers.get(server.id)
        if before is None or before.ended:
            drafts.append(up_line(seat, server))
            price = server.offer.price_usd_per_hour
            before = LedgerServer(
                seat, server.created_at, server.created_at, price, account=server.account
            )
        drafts += _draft_cost(server, before, snapshot)
    for server_id, before in servers.items():
        if server_id not in listed_ids and _has_ended(server_id, before, snapshot):
            drafts += _draft_unseen_end(server_id, before, snapshot)
    return drafts


def _draft_cost(
    server: Server, before: LedgerServer, snapshot: ServerSnapshot
) -> Iterator[CourseLedgerDraft]:
    """Yield the line of a listed server's cost, if enough time has passed since the last one."""
    # An earlier version recorded no account.
    has_new_account = bool(server.account) and not before.account
    if snapshot.at - before.until < (0.0 if has_new_account else LEAST_S):
        return
    if server.state == "stopped":
        before.price = 0.0
    idle_s = snapshot.idle_s.get(server.id, 0.0)
    account = server.account if has_new_account else ""
    yield _cost_line(server.id, before, snapshot.at, idle_s, account)


def _has_ended(server_id: str, before: LedgerServer, snapshot: ServerSnapshot) -> bool:
    """Tell whether a server that the provider did not list must have ended."""
    if server_id in snapshot.in_progress or before.ended:
        return False
    if snapshot.at - before.up_at < snapshot.settle_s:
        return False
    if before.provider and snapshot.provider not in ("", before.provider):
        return False  # another provider answered, which cannot know of its end
    return not _is_unknown(server_id, before, snapshot)


def _draft_unseen_end(
    server_id: str, before: LedgerServer, snapshot: ServerSnapshot
) -> Iterator[CourseLedgerDraft]:
    """Yield the lines of an end that nobody saw: the cost until now, and the end itself."""
    if snapshot.at > before.until:
        yield _cost_line(server_id, before, snapshot.at, 0.0)
    why = f"{UNSEEN}: its hours count until that was noticed"
    detail: dict[str, object] = {"server_id": server_id, "unseen": True}
    if reason := snapshot.endings.get(server_id):
        detail["reason"] = reason
    yield CourseLedgerDraft(kind="down", seat=before.seat, why=why, detail=detail)


def _is_unknown(server_id: str, before: LedgerServer, snapshot: ServerSnapshot) -> bool:
    """Tell whether a missing server may be in another account than the one that answered."""
    if (
        not snapshot.account
        or before.account == snapshot.account
        or server_id in snapshot.confirmed
    ):
        return False
    return bool(before.account or before.price)


def record_ends(
    folder: CourseFolder,
    servers: Iterable[tuple[Seat, Server]],
    by: str,
    why: str = "",
    saved: str = "",
) -> None:
    """Record the last costs and the end of servers whose provider has confirmed that they are gone.

    `saved` says where their results are: HOME, DISK or "".
    """
    now = time.time()
    before = read_servers(folder.ledger.list_entries())
    drafts: list[CourseLedgerDraft] = []
    for seat, server in servers:
        price = server.offer.price_usd_per_hour
        record = before.get(server.id) or LedgerServer(
            seat.name, server.created_at, server.created_at, price
        )
        if record.ended:
            continue
        if server.id not in before:
            drafts.append(up_line(seat.name, server, by))
        if now > record.until and server.state != "stopped":
            drafts.append(_cost_line(server.id, record, now, 0.0))
        detail = {"server_id": server.id, **({"saved": saved} if saved else {})}
        drafts.append(CourseLedgerDraft(kind="down", seat=seat.name, by=by, why=why, detail=detail))
    folder.ledger.append_all(drafts)


def _cost_line(
    server_id: str, before: LedgerServer, until: float, idle_total_s: float, account: str = ""
) -> CourseLedgerDraft:
    span_s = until - before.until
    detail = {
        "server_id": server_id,
        "from": before.until,
        "until": until,
        "usd": span_s / HOUR_S * before.price,
        "idle_s": min(span_s, max(0.0, idle_total_s - before.idle_s)),
        **({"account": account} if account else {}),
    }
    return CourseLedgerDraft(kind="cost", seat=before.seat, detail=detail)


def _read_endings(
    course: LabContext, entries: Iterable[CourseLedgerEntry], servers: Iterable[Server]
) -> dict[str, str]:
    """Return why watchdogs were ending the servers that have vanished, by id."""
    listed_ids = {server.id for server in servers}
    vanished = [
        server_id
        for server_id, server in read_servers(entries).items()
        if not server.ended and server_id not in listed_ids
    ]
    reasons = {}
    for server_id in vanished:
        reports = course.state.list_events(server_id=server_id, kind="watch", limit=1)
        limit = reports[0].detail.get("watch", {}).get("ending") if reports else ""
        if limit in WATCHDOG_WORDS:
            reasons[server_id] = WATCHDOG_WORDS[limit]
    return reasons


def _read_idle_s(course: LabContext, servers: Iterable[Server]) -> dict[str, float]:
    """Return each server's idle seconds since it was created, as its watchdog last reported."""
    idle_s = {}
    for server in servers:
        reports = course.state.list_events(server_id=server.id, kind="watch", limit=1)
        if reports:
            idle_s[server.id] = float(reports[0].detail.get("watch", {}).get("idle_total_s") or 0.0)
    return idle_s

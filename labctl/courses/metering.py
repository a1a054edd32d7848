"""What seats have cost since the last look, written into the course's ledger.

Only what a provider has just shown is written down as going on. What it shows and the ledger does
not know is priced from its tags, so that a lost ledger resets nobody's budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from labctl.courses.context import OWN, own_seat
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.ledger import Draft, Entry
from labctl.errors import BusyError
from labctl.model import Server
from labctl.servers import accounts
from labctl.servers.context import Ground
from labctl.state import State

HOUR_S = 3600.0
# A shorter time is left for a later look: a class of 300 writes 100,000 lines in a term so, and ten
# times as many if each minute is one. Sums count what is not written down yet all the same.
LEAST_S = 600.0
UNSEEN = "ended unseen"
LOOK_S = 0.2  # longer than `_is_ending` holds a lock
LOOKS_S = 2.0  # for all seats together: where somebody else ends a class, each is held by them
HOME, DISK = "home", "disk"
WATCHDOG_WORDS = {
    "budget": "its budget was used up",
    "ttl": "its time was over",
    "idle": "nothing ran there",
}
# So long after it was written down, a server that is not shown may just not be shown yet.
YOUNG_S = 60.0


@dataclass
class Known:
    """One server in the ledger: until when it is paid for, and whether its end is written down."""

    seat: str
    since: float
    until: float
    price: float
    idle_s: float = 0.0
    ended: bool = False
    up_at: float = 0.0
    # "" where it was written down before providers were.
    provider: str = ""
    # "" where its provider has none, or where it was written down before accounts were.
    account: str = ""


@dataclass(frozen=True)
class Look:
    """A provider's answer: who of a course is there, at `at`, and what watchdogs said.

    `idle_s` is the idle time of a server's whole life, where a watchdog reported it. `confirmed`
    are those that are not among `servers` since the provider says that they have ended. `endings`
    says of servers why their watchdogs were ending them. `in_progress` are those that somebody is
    ending now, who writes down their end.
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


def accrue(folder: CourseFolder, course: Ground, listed: Iterable[Server]) -> list[Entry]:
    """Write down what every server of the course has cost until now, and which have ended unseen.

    `listed` is all that the provider shows now. Nothing is written where nothing has changed.
    PolicyError, and nothing is written, where a server of the course is in another account.
    """
    servers = list(listed)
    seats = [
        *folder.seats(active_only=False, former=True),
        *(own_seat(folder, purpose) for purpose in OWN),
    ]
    in_progress = _ends_in_progress(folder, course, seats, servers)
    # After that look, so that an end that was just written down is not written down again.
    entries = folder.ledger.entries()
    before = open_servers(entries, course)
    require_same_account(course, before, {seat.lab_id for seat in seats})
    look = Look(
        at=time.time(),
        servers=servers,
        idle_s=_idle(course, servers),
        settle_s=max(YOUNG_S, course.provider.settle_s),
        provider=course.provider.name,
        account=course.provider.get_account().id,
        confirmed=_confirmed(course, before, {one.id for one in servers}),
        endings=_endings(course, entries, servers),
        in_progress=in_progress,
    )
    return folder.ledger.append_all(lines(entries, seats, look))


@contextmanager
def write_ends(state: State, seats: Iterable[Seat]) -> Iterator[None]:
    """Whoever holds this writes down how the servers of these seats end: nobody else calls an end
    unseen meanwhile. It ends with its process."""
    until = time.monotonic() + LOOKS_S
    with ExitStack() as held:
        for seat in seats:
            wait_s = max(0.0, min(LOOK_S, until - time.monotonic()))
            with suppress(BusyError):  # somebody else ends it too, and holds this for both
                held.enter_context(state.exclusive(_end_lock(seat), "course down", wait_s=wait_s))
        yield


def _ends_in_progress(
    folder: CourseFolder, course: Ground, seats: Iterable[Seat], servers: Iterable[Server]
) -> frozenset[str]:
    """The servers that are not shown any more, and whose end somebody is about to write down."""
    named = {seat.name: seat for seat in seats}
    shown = {one.id for one in servers if one.state not in accounts.ENDED}
    vanished = {
        server_id: named[one.seat]
        for server_id, one in open_servers(folder.ledger.entries(), course).items()
        if server_id not in shown and one.seat in named
    }
    return frozenset(i for i, seat in vanished.items() if _is_ending(course.state, seat))


def _is_ending(state: State, seat: Seat) -> bool:
    try:
        with state.exclusive(_end_lock(seat), "a look", wait_s=0.0):
            return False
    except BusyError:
        return True


def _end_lock(seat: Seat) -> str:
    return f"{seat.lab_id}-end"


def open_servers(entries: Iterable[Entry], course: Ground) -> dict[str, Known]:
    """The servers at the course's provider whose end the ledger does not have, by id."""
    own = ("", course.provider.name)
    return {i: one for i, one in known(entries).items() if not one.ended and one.provider in own}


def require_same_account(course: Ground, servers: dict[str, Known], lab_ids: set[str]) -> None:
    """PolicyError where one of these, or of what this machine has of the labs, is elsewhere."""
    command = "labctl course status --refresh"
    accounts.require_same_account(
        course,
        [one for one in course.state.servers() if one.lab_id in lab_ids],
        [one for one in course.state.open_attempts() if one.lab_id in lab_ids],
        command=command,
    )
    for server_id, one in servers.items():
        if accounts.is_elsewhere(course, one.account):
            subject = f"the server {server_id} of {one.seat}"
            raise accounts.refusal(course, one.account, subject, one.price, command)


def _confirmed(course: Ground, servers: dict[str, Known], shown: set[str]) -> frozenset[str]:
    """Of those without an account, whose absence says nothing, the ones that have ended."""
    doubtful = [
        server_id
        for server_id, one in servers.items()
        if server_id not in shown
        and not accounts.is_attributed(course, one.account, costs=bool(one.price))
    ]
    answers = {server_id: course.provider.find(server_id) for server_id in doubtful}
    return frozenset(i for i, found in answers.items() if found and found.state in accounts.ENDED)


def lines(entries: Iterable[Entry], seats: Iterable[Seat], look: Look) -> list[Draft]:
    """The lines that a look adds to these; pure."""
    names = {seat.lab_id: seat.name for seat in seats}
    servers = known(entries)
    drafts: list[Draft] = []
    shown = set()
    for one in look.servers:
        seat = names.get(one.lab_id)
        if seat is None or one.state in accounts.ENDED:
            continue
        shown.add(one.id)
        before = servers.get(one.id)
        if before is None or before.ended:
            drafts.append(up_line(seat, one))
            price = one.offer.price_usd_per_hour
            before = Known(seat, one.created_at, one.created_at, price, account=one.account)
        news = bool(one.account) and not before.account  # of an earlier labctl's line
        if look.at - before.until >= (0.0 if news else LEAST_S):
            if one.state == "stopped":
                before.price = 0.0
            idle_s = look.idle_s.get(one.id, 0.0)
            drafts.append(_cost(one.id, before, look.at, idle_s, one.account if news else ""))
    for server_id, before in servers.items():
        if server_id in shown or server_id in look.in_progress or before.ended:
            continue
        if look.at - before.up_at < look.settle_s:
            continue
        if before.provider and look.provider not in ("", before.provider):
            continue  # course.yaml names another provider by now, which cannot know of its end
        if _is_unknown(server_id, before, look):
            continue
        if look.at > before.until:
            drafts.append(_cost(server_id, before, look.at, 0.0))
        why = f"{UNSEEN}: its hours count until that was noticed"
        by = look.endings.get(server_id)
        detail = {"server_id": server_id, **({"reason": by} if by else {})}
        drafts.append(Draft(kind="down", seat=before.seat, why=why, detail=detail))
    return drafts


def _is_unknown(server_id: str, before: Known, look: Look) -> bool:
    """Whether its absence says nothing: it may be in another account than the one that answers."""
    if not look.account or before.account == look.account or server_id in look.confirmed:
        return False
    return bool(before.account or before.price)


def up_line(seat: str, server: Server, by: str = "") -> Draft:
    """The line of a server's beginning, from what its tags say."""
    offer = server.offer
    return Draft(
        kind="up",
        seat=seat,
        by=by,
        detail={
            "server_id": server.id,
            "usd_per_hour": offer.price_usd_per_hour,
            "spot": offer.spot,
            "type": offer.type,
            "provider": server.provider,
            "created_at": server.created_at,
            "account": server.account,
        },
    )


def known(entries: Iterable[Entry]) -> dict[str, Known]:
    """The servers that the ledger speaks of, by id."""
    found: dict[str, Known] = {}
    for one in entries:
        detail = one.detail
        server_id = str(detail.get("server_id", ""))
        if not server_id:
            continue
        before = found.get(server_id)
        if one.kind == "up":
            since = float(detail.get("created_at", one.at))
            until = max(since, before.until if before else since)
            price = float(detail.get("usd_per_hour", 0.0))
            idle_s = before.idle_s if before else 0.0
            found[server_id] = Known(
                one.seat,
                since,
                until,
                price,
                idle_s,
                up_at=one.at,
                provider=str(detail.get("provider", "")),
                account=str(detail.get("account", "")),
            )
        elif before is not None and one.kind == "cost":
            before.account = before.account or str(detail.get("account", ""))
            before.until = max(before.until, float(detail.get("until", one.at)))
            before.idle_s += float(detail.get("idle_s", 0.0))
        elif before is not None and one.kind == "down":
            before.ended = True
    return found


def ended(
    folder: CourseFolder,
    servers: Iterable[tuple[Seat, Server]],
    by: str,
    why: str = "",
    saved: str = "",
) -> None:
    """Write down the last costs and the end of servers that their provider has confirmed gone.

    `saved` says where their results are: HOME or DISK.
    """
    now = time.time()
    before = known(folder.ledger.entries())
    drafts: list[Draft] = []
    for seat, server in servers:
        price = server.offer.price_usd_per_hour
        one = before.get(server.id) or Known(seat.name, server.created_at, server.created_at, price)
        if one.ended:
            continue
        if server.id not in before:
            drafts.append(up_line(seat.name, server, by))
        if now > one.until and server.state != "stopped":
            drafts.append(_cost(server.id, one, now, 0.0))
        detail = {"server_id": server.id, **({"saved": saved} if saved else {})}
        drafts.append(Draft(kind="down", seat=seat.name, by=by, why=why, detail=detail))
    folder.ledger.append_all(drafts)


def _cost(
    server_id: str, before: Known, until: float, idle_total_s: float, account: str = ""
) -> Draft:
    span_s = until - before.until
    detail = {
        "server_id": server_id,
        "from": before.until,
        "until": until,
        "usd": span_s / HOUR_S * before.price,
        "idle_s": min(span_s, max(0.0, idle_total_s - before.idle_s)),
        **({"account": account} if account else {}),
    }
    return Draft(kind="cost", seat=before.seat, detail=detail)


def _endings(course: Ground, entries: Iterable[Entry], servers: Iterable[Server]) -> dict[str, str]:
    """Why watchdogs were ending the servers that are not shown any more."""
    shown = {one.id for one in servers}
    gone = [name for name, one in known(entries).items() if not one.ended and name not in shown]
    found = {}
    for name in gone:
        told = course.state.events(server_id=name, kind="watch", limit=1)
        by = told[0].detail.get("watch", {}).get("ending") if told else ""
        if by in WATCHDOG_WORDS:
            found[name] = WATCHDOG_WORDS[by]
    return found


def _idle(course: Ground, servers: Iterable[Server]) -> dict[str, float]:
    """Idle seconds of each server's life, as this machine last heard of its watchdog."""
    found = {}
    for one in servers:
        told = course.state.events(server_id=one.id, kind="watch", limit=1)
        if told:
            found[one.id] = float(told[0].detail.get("watch", {}).get("idle_total_s") or 0.0)
    return found

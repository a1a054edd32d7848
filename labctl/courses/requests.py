"""What a student may ask of the keeper, and the answers: JSON objects, one request at a time.

    hello                                          -> the course, the seat's dollars, assignments
    offers     need                                -> offers
    create     lab lab_id token public_key offer   -> server
    find       id wait_s                           -> server, or null
    servers                                        -> servers, the student's own
    terminate  id
    ended      id                              -> why the seat's last server ended, or null
    extend     id seconds

A failure is {"error": {kind, what, why, hint}}. Who the student is stands in the forced command; a
request that names another is refused. What it asks for is measured by course.yaml's ceilings here:
nothing that a student sends makes a dearer or a longer-lived server.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from labctl.courses.claims import Claim, SeatDesk, Work
from labctl.courses.context import own_seat
from labctl.courses.keys import CHECKER, checked_key, keeper_dir
from labctl.courses.metering import UNSEEN
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.seat_operations import Money
from labctl.errors import NotFoundError, PolicyError, UsageError
from labctl.errors.replies import as_reply
from labctl.errors.unexpected import as_lab_error
from labctl.model import NAME_PATTERN, Need, Offer, Server
from labctl.providers.course import PROVIDER
from labctl.submissions.receiver import Receiver

MOST_LINE_BYTES = 32 * 1024
LONGEST_WAIT_S = 10.0
# Seats that are being made or ended at the same time.
AT_ONCE = 16
REFUSED_EVERY_S = 60.0
FIELDS: dict[str, dict[str, type]] = {
    "hello": {},
    "offers": {"need": dict},
    "create": {"lab": str, "lab_id": str, "token": str, "public_key": str, "offer": dict},
    "find": {"id": str, "wait_s": int},
    "servers": {},
    "terminate": {"id": str},
    "ended": {"id": str},
    "extend": {"id": str, "seconds": int},
}
# What `labctl course check` asks, as any student does before `up`.
CHECKED = ("hello", "offers")
LIFE = ("up", "down")
FOUND_GONE = "the keeper found it gone: its own limits, the provider or staff ended it"
ENDED_BY_STAFF = "the course's staff ended it"
MOST_EXTENSION_S = 7 * 86_400
_ID = re.compile(r"[0-9a-f]{6,32}")
_SERVER = re.compile(rf"{PROVIDER}-([0-9a-f]{{8}})-([0-9a-f]{{6,32}})")


class SeatsWork(Work, Protocol):
    """What a desk needs besides: what may be had, and for how much."""

    def check(self, seat: Seat) -> None:
        """PolicyError where the seat may have no server now."""

    def offers(self, seat: Seat) -> list[Offer]:
        """What there is for this seat, the best first."""

    def money(self, seat: Seat) -> Money: ...

    def extend(self, seat: Seat, server: Server, span_s: int, by: str) -> None:
        """More time; PolicyError beyond a ceiling."""


class Desk:
    """Answers all students of a course, in any number of threads."""

    def __init__(
        self,
        folder: CourseFolder,
        work: SeatsWork,
        *,
        tell: Callable[[str, str], None] = lambda name, text: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.work = work
        self._tell, self._now = tell, now
        self._seats: dict[str, SeatDesk] = {}
        self._refused: dict[str, float] = {}
        self._guard = threading.Lock()
        self._turns = threading.BoundedSemaphore(AT_ONCE)

    def seat(self, seat: Seat) -> SeatDesk:
        with self._guard:
            if seat.name not in self._seats:
                self._seats[seat.name] = SeatDesk(
                    seat,
                    self.work,
                    keeper_dir(self.folder) / "seats" / f"{seat.name}.json",
                    begin=self._begin,
                    tell=lambda text: self._tell(seat.name, text),
                )
            return self._seats[seat.name]

    def seats(self) -> list[SeatDesk]:
        """Every seat that is, or was, held by somebody."""
        known = (keeper_dir(self.folder) / "seats").glob("[!.]*.json")
        names = {path.stem for path in known}
        found = [
            self.seat(one) for one in self.folder.seats(active_only=False) if one.name in names
        ]
        with self._guard:
            # A team that is in the roster no longer may have a server yet.
            return [*found, *(one for one in self._seats.values() if one not in found)]

    def answer(self, student: str, line: bytes) -> dict[str, Any]:
        """The reply to one request, an error too."""
        try:
            asked = read(line, student)
            seat = self._seat_of(student, asked["do"])
            return {"version": 1, **self._answered(seat, student, asked)}
        except PolicyError as error:
            self._note(student, error)
            return as_reply(error)
        except Exception as error:
            return as_reply(as_lab_error(error, partial(self._tell, student)))

    def _seat_of(self, student: str, do: str) -> Seat:
        """The seat that is asked about: for a check one that nobody has, and two questions."""
        if student == CHECKER:
            if do not in CHECKED:
                raise PolicyError(f"a check does not ask for {do}")
            return own_seat(self.folder, "check")
        who = self.folder.student(student)
        if not who.active:
            raise PolicyError(f"{student} has left the course", hint="ask your instructor")
        return self.folder.seat_of(who)

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is being made or ended; False after `timeout_s`."""
        end = time.monotonic() + timeout_s
        return all(one.wait(max(0.0, end - time.monotonic())) for one in [*self._seats.values()])

    def _answered(self, seat: Seat, student: str, asked: dict[str, Any]) -> dict[str, Any]:
        do = asked["do"]
        if do == "hello":
            return {"hello": self._hello(seat, student)}
        if do == "offers":
            return {"offers": self._offers(seat, _typed(asked["need"], Need))}
        if do == "create":
            return {"server": self._create(seat, student, asked)}
        if do == "servers":
            desk = self.seat(seat)
            desk.look()
            return {"servers": desk.views(student)}
        token = _token(asked["id"], seat)
        if do == "find":
            wait_s = min(max(0, asked["wait_s"]), LONGEST_WAIT_S)
            return {"server": self.seat(seat).find(token, student, wait_s) if token else None}
        if do == "ended":
            return {"ended": self._ended(seat) if token else None}
        if do == "terminate":
            if token:
                self.seat(seat).leave(token, student)
            return {}
        return self._extend(seat, student, token, asked["seconds"])

    def _hello(self, seat: Seat, student: str) -> dict[str, Any]:
        config, money = self.folder.config, self.work.money(seat)
        return {
            **welcome(self.folder, student),
            "seat": seat.name,
            "seat_id": seat.lab_id,
            "shared": config.shared is not None,
            "allowance_usd": money.allowance_usd,
            "spent_usd": money.spent_usd,
            "ttl_s": config.per_student.ttl,
            "max_ttl_s": config.per_student.max_ttl,
        }

    def _offers(self, seat: Seat, need: Need) -> list[Offer]:
        most, gpu = need.max_price_usd_per_hour, need.gpu
        found = [
            msgspec.structs.replace(one, provider=PROVIDER)
            for one in self.work.offers(seat)
            if (most is None or one.price_usd_per_hour <= most)
            and not (gpu.required and one.gpu_count < max(1, gpu.count))
            and one.gpu_memory_bytes >= gpu.min_memory_bytes
        ]
        return sorted(found, key=lambda one: one.price_usd_per_hour)

    def _create(self, seat: Seat, student: str, asked: dict[str, Any]) -> Server:
        lab, lab_id, token = asked["lab"], asked["lab_id"], asked["token"]
        if not NAME_PATTERN.fullmatch(lab):
            raise UsageError(f"{lab[:60]!a} is no lab's name")
        if not _ID.fullmatch(lab_id) or not _ID.fullmatch(token):
            raise UsageError("a lab and an attempt are named by hex digits")
        key = " ".join(checked_key(asked["public_key"]))
        offer = _typed(asked["offer"], Offer)
        desk = self.seat(seat)
        if token not in [one.token for one in desk.claims]:
            self._check_term()
            self.work.check(seat)
        offers = self.work.offers(seat)
        same = [one for one in offers if (one.type, one.zone) == (offer.type, offer.zone)]
        new = Claim(
            token=token,
            student=student,
            lab=lab,
            lab_id=lab_id,
            public_key=key,
            offer=(same or offers or [Offer(provider=PROVIDER, type="")])[0],
            at=self._now(),
        )
        return desk.claim(new)

    def _check_term(self) -> None:
        from datetime import datetime

        term = self.folder.config.term
        today = datetime.fromtimestamp(self._now()).date()
        if term is not None and not term.first <= today <= term.last:
            raise PolicyError(
                f"{self.folder.config.name} gives no servers today",
                why=f"its term is from {term.first} to {term.last}",
            )

    def _ended(self, seat: Seat) -> dict[str, Any] | None:
        """Why the seat has no server now, from the ledger; None where it has one."""
        lines = [one for one in self.folder.ledger.entries(seat=seat.name) if one.kind in LIFE]
        if not lines or lines[-1].kind == "up":
            return None
        last = lines[-1]
        why = FOUND_GONE if last.why.startswith(UNSEEN) else last.why or ENDED_BY_STAFF
        reason = str(last.detail.get("reason") or why)
        return {"at": last.at, "why": reason, "saved": str(last.detail.get("saved", ""))}

    def _extend(self, seat: Seat, student: str, token: str, seconds: int) -> dict[str, Any]:
        desk = self.seat(seat)
        server = desk.look()
        if server is None or token not in [one.token for one in desk.claims]:
            raise NotFoundError("you have no server now", hint="labctl up")
        if not 0 < seconds <= MOST_EXTENSION_S:
            raise UsageError(f"{seconds} seconds are no extension", hint="labctl extend 2h")
        self.work.extend(seat, server, seconds, student)
        return {"server": desk.find(token, student)}

    def _begin(self, deed: Callable[[], None]) -> None:
        def run() -> None:
            with self._turns:
                deed()

        threading.Thread(target=run, name="seat", daemon=True).start()

    def _note(self, student: str, error: PolicyError) -> None:
        """Write a refusal down, but not every one of somebody who tries again and again."""
        if student == CHECKER:
            return
        with self._guard:
            if self._now() - self._refused.get(student, 0.0) < REFUSED_EVERY_S:
                return
            self._refused[student] = self._now()
        self.folder.ledger.append("refused", student=student, by="keeper", why=error.what[:300])


def welcome(folder: CourseFolder, student: str) -> dict[str, Any]:
    """What somebody who joins is told of the course."""
    files = sorted((folder.drop / "assignments").glob("[!.]*.yaml"))
    return {
        "course": folder.config.name,
        "student": student,
        "image": folder.config.lab.image.reference,
        "receiver": Receiver(folder.drop).init(),
        "assignments": {file.stem: file.read_text() for file in files},
    }


def read(line: bytes, student: str) -> dict[str, Any]:
    """A request, checked field by field; UsageError, PolicyError where it names somebody else."""
    try:
        asked = json.loads(line)
        wanted = FIELDS[asked["do"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError("this is no request") from None
    other = asked.get("student", student)
    if other != student:
        raise PolicyError(
            f"this key is {student}'s, not {str(other)[:60]!a}'s",
            why="everybody has a key of their own",
        )
    given = set(asked) - {"do", "student"}
    if given != set(wanted) or any(type(asked[key]) is not kind for key, kind in wanted.items()):
        raise UsageError(f"{asked['do']} takes {', '.join(sorted(wanted)) or 'nothing'}")
    found: dict[str, Any] = asked
    return found


def _token(server_id: str, seat: Seat) -> str:
    """The claim that an id means; "" where it is none of this seat's."""
    match = _SERVER.fullmatch(server_id)
    return match[2] if match and match[1] == seat.pseudonym else ""


def _typed(given: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise UsageError("this is no request", why=str(error)) from None

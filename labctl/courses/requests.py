"""The requests that students may send to the keeper, and its replies: one JSON object each.

    hello                                          -> the course, the seat's dollars, assignments
    offers     need                                -> offers
    create     lab lab_id token public_key offer   -> server
    find       id wait_s                           -> server, or null
    servers                                        -> servers, the student's own
    terminate  id
    ended      id                              -> why the seat's last server ended, or null
    extend     id seconds
    starter    assignment sha256 offset            -> a part of the assignment's starter
    saved                                          -> files, the seat's saved results
    saved-file path offset                         -> a part of one of them

A failure is {"error": {kind, what, why, hint}}. The forced command names the student; a request in
the name of another is refused. The limits of course.yaml are enforced here: no request can get a
more expensive or longer-lived server.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from labctl.courses import saved_files, starters
from labctl.courses.claims import SharedSeatServer
from labctl.courses.context import build_own_seat
from labctl.courses.keys import CHECKER, keeper_dir, parse_key
from labctl.courses.publish import describe_course
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.seat_actions import SeatActions
from labctl.courses.seat_claims import EndFailure, SeatClaim
from labctl.courses.seat_ends import describe_end
from labctl.errors import NotFoundError, PolicyError, UsageError
from labctl.errors.replies import as_reply
from labctl.errors.unexpected import as_lab_error
from labctl.model import NAME_PATTERN, Need, Offer, Server, Value, make_record, parse_record
from labctl.providers.course import PROVIDER
from labctl.submissions.student_requests import parse_student_request
from labctl.wire.codec import Message, MessageError, encode
from labctl.wire.keeper import (
    CREATE_SEAT_SERVER,
    END_SEAT_SERVER,
    EXPLAIN_SEAT_END,
    EXTEND_SEAT_SERVER,
    FETCH_SAVED_FILE,
    FETCH_STARTER,
    FIND_SEAT_SERVER,
    GREET_KEEPER,
    LIST_OFFERS,
    LIST_SAVED_FILES,
    LIST_SEAT_SERVERS,
    CreateSeatServerReply,
    CreateSeatServerRequest,
    EndSeatServerReply,
    EndSeatServerRequest,
    ExplainSeatEndReply,
    ExplainSeatEndRequest,
    ExtendSeatServerReply,
    ExtendSeatServerRequest,
    FetchSavedFileRequest,
    FetchStarterRequest,
    FindSeatServerReply,
    FindSeatServerRequest,
    GreetKeeperReply,
    GreetKeeperRequest,
    KeeperRequest,
    ListOffersReply,
    ListOffersRequest,
    ListSavedFilesReply,
    ListSavedFilesRequest,
    ListSeatServersReply,
    ListSeatServersRequest,
    OfferRecord,
    SeatGreetingRecord,
    SeatServerRecord,
)
from labctl.wire.verbs import Reply, Request, Verb

MOST_LINE_BYTES = 32 * 1024
LONGEST_WAIT_S = 10.0
# Servers of seats that are created or ended at the same time.
AT_ONCE = 16
REFUSED_EVERY_S = 60.0
VERBS: dict[str, Verb[Any, Any]] = {
    verb.name: verb
    for verb in (
        GREET_KEEPER,
        LIST_OFFERS,
        CREATE_SEAT_SERVER,
        FIND_SEAT_SERVER,
        LIST_SEAT_SERVERS,
        END_SEAT_SERVER,
        EXPLAIN_SEAT_END,
        EXTEND_SEAT_SERVER,
        FETCH_STARTER,
        LIST_SAVED_FILES,
        FETCH_SAVED_FILE,
    )
}
# The requests of `labctl course check`, which are those of a student before `up`.
CHECKED = (GREET_KEEPER.name, LIST_OFFERS.name)
MOST_EXTENSION_S = 7 * 86_400
Model = TypeVar("Model", bound=Value)
_ID = re.compile(r"[0-9a-f]{6,32}")
_SERVER = re.compile(rf"{PROVIDER}-([0-9a-f]{{8}})-([0-9a-f]{{6,32}})")


class RequestHandler:
    """Answers the requests of all students of a course, safe for several threads."""

    def __init__(
        self,
        folder: CourseFolder,
        work: SeatActions,
        *,
        notify: Callable[[str, str], None] = lambda name, text: None,
    ) -> None:
        self.folder = folder
        self.work = work
        self._notify = notify
        self._seats: dict[str, SharedSeatServer] = {}
        self._refused: dict[str, float] = {}
        self._guard = threading.Lock()
        self._slots = threading.BoundedSemaphore(AT_ONCE)

    def get_seat_server(self, seat: Seat) -> SharedSeatServer:
        """Return the worker of a seat's server; it is created at the first call."""
        with self._guard:
            if seat.name not in self._seats:
                self._seats[seat.name] = SharedSeatServer(
                    seat,
                    self.work,
                    keeper_dir(self.folder) / "seats" / f"{seat.name}.json",
                    begin=self._begin,
                    notify=lambda text: self._notify(seat.name, text),
                )
            return self._seats[seat.name]

    def list_seat_servers(self) -> list[SharedSeatServer]:
        """List every seat that is or was claimed."""
        files = (keeper_dir(self.folder) / "seats").glob("[!.]*.json")
        names = {path.stem for path in files}
        listed = [
            self.get_seat_server(seat)
            for seat in self.folder.list_seats(active_only=False)
            if seat.name in names
        ]
        with self._guard:
            # A team that left the roster may still have a server.
            return [
                *listed,
                *(seat_server for seat_server in self._seats.values() if seat_server not in listed),
            ]

    def answer(self, student: str, line: bytes) -> bytes:
        """Return the reply to one request as JSON; errors become replies too."""
        try:
            with self._record_refusals(student):
                do, request = parse_student_request(line, VERBS, student)
                reply = self._dispatch(self._seat_of(student, do), student, request)
            return encode(reply).encode()
        except Exception as error:
            reply = as_reply(as_lab_error(error, partial(self._notify, student)))
            return encode(reply).encode()

    def handle(self, student: str, verb: Verb[Request, Reply], request: Request) -> Reply:
        """Do what `answer` does for a request of this process; LabError instead of an error reply.

        The caller knows who the student is, as the forced command does.
        """
        try:
            with self._record_refusals(student):
                seat = self._seat_of(student, verb.name)
                reply = self._dispatch(seat, student, cast(KeeperRequest, request))
        except Exception as error:
            raise as_lab_error(error, partial(self._notify, student)) from error
        assert isinstance(reply, verb.reply)
        return reply

    def list_claims(self, seat: str, student: str) -> tuple[SeatClaim, ...]:
        """List a student's claims on a seat's server, without waiting for its worker."""
        with self._guard:
            seat_server = self._seats.get(seat)
        claims = seat_server.claims if seat_server is not None else ()
        return tuple(claim for claim in claims if claim.student == student)

    def is_ready(self, seat: str, claim: SeatClaim) -> bool:
        """Tell whether a claim on a seat's server can be used now, without waiting."""
        with self._guard:
            seat_server = self._seats.get(seat)
        return seat_server is not None and seat_server.is_ready(claim)

    def find_end_failure(self, seat: str) -> EndFailure | None:
        """Return why a seat's server could not be saved and ended, without waiting."""
        with self._guard:
            seat_server = self._seats.get(seat)
        return seat_server.find_end_failure() if seat_server is not None else None

    def _seat_of(self, student: str, do: str) -> Seat:
        """Return the student's seat; for a check, a seat without students and two requests only."""
        if student == CHECKER:
            if do not in CHECKED:
                raise PolicyError(f"a check must not send the request {do}")
            return build_own_seat(self.folder, "check")
        who = self.folder.find_student(student)
        if not who.active:
            raise PolicyError(f"{student} has left the course", hint="ask your instructor")
        return self.folder.find_seat_of(who)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no server is being created or ended; return False after `timeout_s`."""
        end = time.monotonic() + timeout_s
        seat_servers = [*self._seats.values()]
        return all(
            seat_server.wait(max(0.0, end - time.monotonic())) for seat_server in seat_servers
        )

    def _dispatch(self, seat: Seat, student: str, request: KeeperRequest) -> NamedTuple:
        if isinstance(request, GreetKeeperRequest):
            return self._greet(seat, student)
        if isinstance(request, FetchStarterRequest):
            return starters.read_part(self.folder, request)
        if isinstance(request, ListSavedFilesRequest):
            return ListSavedFilesReply(saved_files.list_saved_files(self.folder, seat))
        if isinstance(request, FetchSavedFileRequest):
            return saved_files.read_saved_part(self.folder, seat, request)
        if isinstance(request, ListOffersRequest):
            offers = self._offers(seat, _parse(Need, request.need))
            return ListOffersReply(tuple(make_record(OfferRecord, offer) for offer in offers))
        if isinstance(request, CreateSeatServerRequest):
            server = self._create(seat, student, request)
            return CreateSeatServerReply(make_record(SeatServerRecord, server))
        if isinstance(request, ListSeatServersRequest):
            seat_server = self.get_seat_server(seat)
            seat_server.check_server()
            servers = seat_server.list_views(student)
            return ListSeatServersReply(
                tuple(make_record(SeatServerRecord, server) for server in servers),
                seat_server=_describe_server(seat_server.describe_running()),
            )
        token = _parse_token(request.id, seat)
        if isinstance(request, FindSeatServerRequest):
            wait_s = min(max(0, request.wait_s), LONGEST_WAIT_S)
            found = self.get_seat_server(seat).find(token, student, wait_s) if token else None
            return FindSeatServerReply(_describe_server(found))
        if isinstance(request, ExplainSeatEndRequest):
            ended = describe_end(self.folder, seat) or self.work.explain_stop(seat)
            return ExplainSeatEndReply(ended if token else None)
        if isinstance(request, EndSeatServerRequest):
            if token:
                self.get_seat_server(seat).release(token, student)
            return EndSeatServerReply()
        return self._extend(seat, student, token, request)

    def _greet(self, seat: Seat, student: str) -> GreetKeeperReply:
        config, money = self.folder.config, self.work.money(seat)
        course = describe_course(self.folder, student)
        return GreetKeeperReply(
            SeatGreetingRecord(
                **course._asdict(),
                seat=seat.name,
                seat_id=seat.lab_id,
                shared=config.shared is not None,
                allowance_usd=money.allowance_usd,
                spent_usd=money.spent_usd,
                ttl_s=config.per_student.ttl,
                max_ttl_s=config.per_student.max_ttl,
            )
        )

    def _offers(self, seat: Seat, need: Need) -> list[Offer]:
        most, gpu = need.max_price_usd_per_hour, need.gpu
        offers = [
            msgspec.structs.replace(offer, provider=PROVIDER)
            for offer in self.work.offers(seat)
            if (most is None or offer.price_usd_per_hour <= most)
            and not (gpu.is_required and offer.gpu_count < max(1, gpu.count))
            and offer.gpu_memory_bytes >= gpu.min_memory_bytes
        ]
        return sorted(offers, key=lambda offer: offer.price_usd_per_hour)

    def _create(self, seat: Seat, student: str, request: CreateSeatServerRequest) -> Server:
        lab, lab_id, token = request.lab, request.lab_id, request.token
        if not NAME_PATTERN.fullmatch(lab):
            raise UsageError(f"{lab[:60]!a} is not a valid lab name")
        if not _ID.fullmatch(lab_id) or not _ID.fullmatch(token):
            raise UsageError("the ids of a lab and an attempt must be hex digits")
        key = " ".join(parse_key(request.public_key))
        offer = _parse(Offer, request.offer)
        seat_server = self.get_seat_server(seat)
        if token not in [claim.token for claim in seat_server.claims]:
            self._check_term()
            self.work.check(seat)
        offers = self.work.offers(seat)
        chosen = (offer.type, offer.zone)
        same = [other for other in offers if (other.type, other.zone) == chosen]
        new = SeatClaim(
            token=token,
            student=student,
            lab=lab,
            lab_id=lab_id,
            public_key=key,
            offer=(same or offers or [Offer(provider=PROVIDER, type="")])[0],
            at=time.time(),
        )
        return seat_server.claim(new)

    def _check_term(self) -> None:
        term = self.folder.config.term
        today = datetime.fromtimestamp(time.time()).date()
        if term is not None and not term.first <= today <= term.last:
            raise PolicyError(
                f"{self.folder.config.name} provides no servers today",
                why=f"its term runs from {term.first} to {term.last}",
            )

    def _extend(
        self, seat: Seat, student: str, token: str, request: ExtendSeatServerRequest
    ) -> ExtendSeatServerReply:
        seat_server, seconds = self.get_seat_server(seat), request.seconds
        server = seat_server.check_server()
        if server is None or token not in [claim.token for claim in seat_server.claims]:
            raise NotFoundError("you have no server now", hint="labctl up")
        if not 0 < seconds <= MOST_EXTENSION_S:
            raise UsageError(
                f"cannot extend by {seconds} seconds",
                why="at most 7 days at a time",
                hint="labctl extend 2h",
            )
        self.work.extend(seat, server, seconds, student)
        return ExtendSeatServerReply(_describe_server(seat_server.find(token, student)))

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            with self._slots:
                work()

        threading.Thread(target=run, name="seat", daemon=True).start()

    @contextlib.contextmanager
    def _record_refusals(self, student: str) -> Iterator[None]:
        try:
            yield
        except PolicyError as error:
            self._record_refusal(student, error)
            raise

    def _record_refusal(self, student: str, error: PolicyError) -> None:
        """Record a refusal in the ledger, at most one a minute for each student."""
        if student == CHECKER:
            return
        with self._guard:
            if time.time() - self._refused.get(student, 0.0) < REFUSED_EVERY_S:
                return
            self._refused[student] = time.time()
        self.folder.ledger.append("refused", student=student, by="keeper", why=error.what[:300])


def _parse_token(server_id: str, seat: Seat) -> str:
    """Return the claim's token in a server id, or "" if it is not a server of this seat."""
    match = _SERVER.fullmatch(server_id)
    return match[2] if match and match[1] == seat.pseudonym else ""


def _describe_server(server: Server | None) -> SeatServerRecord | None:
    return None if server is None else make_record(SeatServerRecord, server)


def _parse(kind: type[Model], record: Message) -> Model:
    """Return the value of labctl.model that a student's record stands for."""
    try:
        return parse_record(kind, record)
    except MessageError as error:
        raise UsageError("this is not a valid request", why=str(error)) from None

"""What a student's page does: the keeper's own requests, in the name of the signed-in student.

Every limit is where it is for `labctl up`, `extend` and `down`: in `courses.requests`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping

import msgspec

from labctl.courses import join_codes
from labctl.courses.claims import SharedSeatServer
from labctl.courses.requests import RequestHandler
from labctl.courses.seat_claims import EndFailure, SeatClaim
from labctl.errors import CapacityError, LabError, NotFoundError
from labctl.model import Need, Run, Value, make_record
from labctl.sync.starter_update import FileChange
from labctl.web.mutations import CourseActions, LogReader
from labctl.web.view import SeatView
from labctl.wire.keeper import (
    CREATE_SEAT_SERVER,
    END_SEAT_SERVER,
    EXTEND_SEAT_SERVER,
    FIND_SEAT_SERVER,
    LIST_OFFERS,
    CreateSeatServerRequest,
    EndSeatServerRequest,
    ExtendSeatServerRequest,
    FindSeatServerRequest,
    ListOffersRequest,
    NeedRecord,
    OfferRecord,
)

# time for which a price counts as current
PRICE_S = 60.0
POLL_S = 1.0


class Standing(Value, frozen=True):
    """A student's hold on their seat's server, and why the last one could not start or ended.

    `labs` are the labs of the student that can use it, (id, name), or those that wait for it;
    without any, the server is the team's or the staff's alone. `starting` lasts until the server is
    prepared and the student can log in, which is later than its machine runs. `end_failure` says
    why the server could not be saved and ended.
    """

    labs: tuple[tuple[str, str], ...] = ()
    starting: bool = False
    ending: bool = False
    problem: str = ""
    end_failure: EndFailure | None = None


def label_labs(names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (id, label) of each lab: its name and, for one name on two devices, part of the id."""
    counts = Counter(names.values())
    labels = {
        id_: name if counts[name] == 1 else f"{name} ({id_[:4]})" for id_, name in names.items()
    }
    return tuple(sorted(labels.items()))


class StudentActions:
    """The actions of all students of a course. Their methods may take seconds: use threads."""

    def __init__(self, request_handler: RequestHandler, course: CourseActions) -> None:
        self._requests = request_handler
        self._course = course
        self._lock = threading.Lock()
        # student -> the server that was requested here and is not ready; "" until it has an id
        self._starting: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        # the best offer to a seat without a server, the same for all, and when it was read
        self._offer: OfferRecord | None = None
        self._offer_at = 0.0
        self._reading = threading.Lock()

    # what the pages show, without any wait

    def find_standing(self, student: str, seat: SeatView) -> Standing:
        held = self._find_held(seat.name, student)
        ready = [claim for claim in held if self._requests.is_ready(seat.name, claim)]
        return Standing(
            labs=label_labs({claim.lab_id: claim.lab for claim in ready or held}),
            starting=student in self._starting or (bool(held) and not ready),
            ending=not held and bool(self._requests.list_claims(seat.name, student)),
            problem=self._problems.get(student, ""),
            end_failure=self._find_end_failure(seat.name),
        )

    def _find_end_failure(self, seat: str) -> EndFailure | None:
        """Return why the seat's server could not end, without the path of the course's folder."""
        failure = self._requests.find_end_failure(seat)
        if failure is None:
            return None
        path, folder = str(self._requests.folder.path), "the course's folder"
        what, why = (text.replace(path, folder) for text in (failure.what, failure.why))
        return msgspec.structs.replace(failure, what=what, why=why)

    def find_offer(self) -> OfferRecord | None:
        """Return what a new server would be, as `read_offer` last read it."""
        return self._offer

    # requests

    def needs_offer(self, seat: SeatView) -> bool:
        """Tell whether the offer should be read again, which may ask the provider."""
        is_up = seat.machine is not None and seat.machine.bills
        is_current = self._offer_at and time.monotonic() - self._offer_at < PRICE_S
        return not is_up and not is_current

    def read_offer(self, student: str) -> None:
        """Read what a new server would be, in the name of a student without one.

        Several pages that want it at once cost one request.
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._offer_at = time.monotonic()  # an error counts as read, too
            offers = self._list_offers(student)
            self._offer = offers[0] if offers else None
        finally:
            self._reading.release()

    def start(self, student: str) -> None:
        """Claim the seat's server, as `labctl up` does; a seat without one gets a new one.

        The lab is the seat's own, and nobody has the private half of its key.
        """
        folder = self._requests.folder
        seat = folder.find_seat_of(student)
        if self._find_held(seat.name, student):
            return
        offers = self._list_offers(student)
        if not offers:
            raise CapacityError("no server is available now", why="try again in a few minutes")
        with self._lock:
            if student in self._starting:
                return
            self._starting[student] = ""
            self._problems.pop(student, None)
        request = CreateSeatServerRequest(
            lab=seat.lab,
            lab_id=seat.lab_id,
            token=secrets.token_hex(8),
            public_key=join_codes.make_unusable_key(),
            offer=offers[0],
        )
        try:
            server = self._requests.handle(student, CREATE_SEAT_SERVER, request).server
        except LabError:
            del self._starting[student]
            raise
        self._starting[student] = server.id

    def extend(self, student: str, span_s: int) -> None:
        """Extend the server's time within the course's limits, as `labctl extend` does."""
        seat, held = self._require_held(student)
        server_id = seat.server_id_of(held[0])
        self._requests.handle(
            student, EXTEND_SEAT_SERVER, ExtendSeatServerRequest(server_id, span_s)
        )

    def end(self, student: str) -> None:
        """Release the server for all of this student's labs, as `labctl down` does in each."""
        seat, held = self._require_held(student)
        for claim in held:
            self._requests.handle(
                student, END_SEAT_SERVER, EndSeatServerRequest(seat.server_id_of(claim))
            )

    def cancel(self, student: str, seat: SeatView, run_id: str) -> tuple[Run, bool]:
        """Stop a run of the student's seat, as `labctl cancel` does."""
        return self._course.cancel(seat.name, run_id, by=student)

    def write_starter(self, seat: SeatView, assignment: str) -> tuple[FileChange, ...]:
        """Write an assignment's files into the seat's lab; return what was done."""
        return self._course.write_starter(seat.name, assignment)

    def open_log(self, seat: SeatView, run_id: str, tail_lines: int, most: int) -> LogReader:
        lab, server, run = self._course.find_run(seat.name, run_id)
        return LogReader(lab, server, run, tail_lines, most)

    async def watch_starts(self) -> None:
        """Note which of the requested servers are ready or failed, until this is canceled."""
        while True:
            await asyncio.sleep(POLL_S)
            requested = [(student, one) for student, one in self._starting.items() if one]
            for student, server_id in requested:
                await asyncio.to_thread(self._check_start, student, server_id)

    def _check_start(self, student: str, server_id: str) -> None:
        try:
            request = FindSeatServerRequest(server_id, 0)
            server = self._requests.handle(student, FIND_SEAT_SERVER, request).server
        except LabError as error:
            self._problems[student] = " ".join(filter(None, [f"{error.what}.", error.why]))
        else:
            if server is not None and server.state == "starting":
                return
            if server is None:
                self._problems[student] = "It ended before it was ready."
        self._starting.pop(student, None)

    def _find_held(self, seat: str, student: str) -> tuple[SeatClaim, ...]:
        claims = self._requests.list_claims(seat, student)
        return tuple(claim for claim in claims if not claim.leaving)

    def _require_held(self, student: str) -> tuple[SharedSeatServer, tuple[SeatClaim, ...]]:
        seat = self._requests.folder.find_seat_of(student)
        held = self._find_held(seat.name, student)
        if not held:
            raise NotFoundError("you have no server now")
        return self._requests.get_seat_server(seat), held

    def _list_offers(self, student: str) -> tuple[OfferRecord, ...]:
        need = make_record(NeedRecord, Need())
        return self._requests.handle(student, LIST_OFFERS, ListOffersRequest(need)).offers

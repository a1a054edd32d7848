"""The page for students as an ASGI application: each signed-in student sees their own seat.

No address names a student: the session does. So nobody else's page has an address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection

from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.submissions.receiver import Receiver
from labctl.web.course_site import CourseSite, capitalize, list_parts, stream_response
from labctl.web.downloads import (
    download_response,
    find_bundle,
    read_receipt,
    read_report,
    sandboxed_response,
)
from labctl.web.live_updates import Feed
from labctl.web.log_streams import LINES as TAIL_LINES
from labctl.web.log_streams import MOST_BYTES, LogStreams
from labctl.web.pages import Pages
from labctl.web.student_access import StudentAccess, session_of
from labctl.web.student_actions import StudentActions
from labctl.web.student_forms import StudentForms
from labctl.web.student_parts import StudentParts
from labctl.web.student_services import (
    OPEN,
    PATHS,
    TITLES,
    ServiceKey,
    StudentServices,
)
from labctl.web.student_sign_in import StudentSignIn
from labctl.web.student_submissions import StudentSubmissions
from labctl.web.student_terminal import StudentTerminals, TerminalOpener
from labctl.web.view import PersonView, SeatView, Snapshot, SubmissionView
from labctl.web.web_site import Routes, add_routes

if TYPE_CHECKING:
    from labctl.courses.server_submissions import ServerSubmissions
    from labctl.web.institution_sign_in import InstitutionSignIn

# logs that are open in the browsers of all students together
MOST_LOGS = 40
# how often a page looks whether a service has started
REFRESH_S = 2
Page = tuple[Snapshot, PersonView, SeatView]

# below the reason why a service did not start
START_FAILED = "If it fails again, tell your instructor: the keeper's log has the details."


class StudentPage(CourseSite):
    """The page for the students of one course."""

    base, home = "student_base.html.j2", "My seat"

    def __init__(
        self,
        feed: Feed,
        pages: Pages,
        access: StudentAccess,
        actions: StudentActions,
        drop: Path,
        middleware: Sequence[Middleware],
        services: StudentServices | None,
        services_url: str,
        institution: InstitutionSignIn | None,
        submissions: ServerSubmissions,
        open_terminal: TerminalOpener,
        notify: Callable[[str], None],
    ) -> None:
        super().__init__(feed, pages, middleware)
        self.access = access
        self.actions = actions
        self.services = services
        self.services_url = services_url
        self.parts = StudentParts(pages, actions, drop, has_services=services is not None)
        self.receiver = Receiver(drop)
        self.log_streams = LogStreams(MOST_LOGS)
        # students without a server, whose page wants a price
        self._price_requests: asyncio.Queue[str] = asyncio.Queue()
        routes: Routes = {
            "/": self.show_seat,
            "/events": self.stream_events,
            "/runs/{run}/log": self.stream_log,
            "/submissions/{name}/feedback": self.send_feedback,
            "/submissions/{name}/{number}/receipt": self.send_receipt,
            "/submissions/{name}/{number}/report": self.send_report,
            "/services/{lab_id}/{name}": self.open_service,
        }
        add_routes(self.app, "GET", routes)
        StudentSignIn(pages, access, institution).add_to(self.app)
        StudentForms(self).add_to(self.app)
        self._submissions = submissions
        StudentSubmissions(self, submissions).add_to(self.app)
        StudentTerminals(self, open_terminal, notify).add_to(self.app)

    def close(self) -> None:
        super().close()
        self._submissions.close()

    def list_tasks(self) -> list[Coroutine[Any, Any, None]]:
        own = [self.access.watch(), self.actions.watch_starts(), self._read_prices()]
        return [*super().list_tasks(), *own]

    async def prepare(self) -> None:
        """Read the course and draw a page in advance, so that the first student waits no longer."""
        with contextlib.suppress(LabError):  # the page shows it
            snapshot = await self.feed.read_snapshot()
            for person in snapshot.people[:1]:
                self.parts.draw(person.id)(snapshot)
        self.feed.expire()

    def describe_error(
        self, request: Request, what: str, why: str, status: int
    ) -> tuple[str, list[str]]:
        # Errors of the course's files have paths of this machine: staff reads them.
        return what, [why] if status < 500 and why else []

    async def _read_prices(self) -> None:
        """Read the price of a new server when a page wants it, until this is canceled."""
        while True:
            student = await self._price_requests.get()
            while not self._price_requests.empty():
                self._price_requests.get_nowait()
            with contextlib.suppress(LabError):  # without a price, the page does not show it
                await asyncio.to_thread(self.actions.read_offer, student)

    # the page

    async def show_seat(self, request: Request, run: str = "") -> Response:
        student = session_of(request).student
        snapshot, person, seat = await self.find_seat(request)
        shown_run = next((one for one in seat.runs if one.id == run), None)
        if run and shown_run is None:
            raise NotFoundError("your seat has no run with this id")
        if self.actions.needs_offer(seat):
            # The page does not wait for the provider: a later update shows the price.
            self._price_requests.put_nowait(student)
        channel = await self.feed.open_channel(student, self.parts.draw(student))
        since = urlencode({"since": self.feed.version(channel)})
        return self.render_page(
            request,
            snapshot,
            "student",
            person=person,
            seat=seat,
            run=shown_run,
            parts=list_parts(channel),
            stream=f"/events?{since}",
        )

    async def find_seat(self, request: HTTPConnection) -> Page:
        """Return the student's own person and seat; NotFoundError for one without a seat."""
        student = session_of(request).student
        name = self.access.find_seat(student)
        page = _find_page(await self.feed.read_snapshot(), student, name)
        if page is None:  # the student got another seat since the snapshot
            await self.feed.renew()
            page = _find_page(await self.feed.read_snapshot(), student, name)
        if page is None:
            raise NotFoundError("you have no seat in this course", hint="ask your instructor")
        return page

    def require_run(self, seat: SeatView, run: str) -> None:
        """Raise NotFoundError if the seat has no such run."""
        if not any(one.id == run for one in seat.runs):
            raise NotFoundError("your seat has no run with this id")

    async def stream_events(self, request: Request, since: str = "") -> Response:
        await self.find_seat(request)  # another one than before needs a new snapshot
        student = session_of(request).student
        version = request.headers.get("last-event-id") or since
        return stream_response(self.feed.watch(student, self.parts.draw(student), version))

    async def stream_log(self, request: Request, run: str) -> Response:
        _, _, seat = await self.find_seat(request)
        self.require_run(seat, run)
        stream = self.log_streams.watch(
            seat.key, run, lambda: self.actions.open_log(seat, run, TAIL_LINES, MOST_BYTES)
        )
        return stream_response(stream)

    async def open_service(self, request: Request, lab_id: str, name: str) -> Response:
        """Lead to a service of one of the student's labs; start it first if needed.

        Only this page's own links get here, since SameOrigin refuses those of others.
        """
        _, person, seat = await self.find_seat(request)
        if self.services is None or name not in PATHS:
            raise NotFoundError("this page does not exist")
        key = ServiceKey(seat=seat.name, lab_id=lab_id, name=name)
        try:
            is_open = await asyncio.to_thread(self.services.ensure, person.id, key)
        except (NotFoundError, PolicyError):
            raise
        except LabError as error:
            title = f"{TITLES[name]} could not be started"
            lines = [f"{capitalize(error.what)}.", START_FAILED]
            return await self.render_message(request, title, lines, 503, retry=request.url.path)
        if is_open:
            data = {**request.session, "lab": lab_id, "name": name}
            ticket = urlencode({"ticket": self.services.issue_ticket(data)})
            return RedirectResponse(f"{self.services_url}{OPEN}?{ticket}", 303)
        lines = ["The first time, this can take some minutes. This page then leads you there."]
        page = await self.render_message(request, f"Starting {TITLES[name]}", lines, 200)
        page.headers["refresh"] = str(REFRESH_S)
        return page

    # work

    async def send_feedback(self, request: Request, name: str) -> Response:
        snapshot, person, _ = await self.find_seat(request)
        if name in {one.name for one in snapshot.assignments}:
            feedback = await asyncio.to_thread(self.receiver.feedback, name, person.id)
            if feedback is not None:
                return sandboxed_response(feedback.page.encode())
        raise NotFoundError("no feedback was released to you for this assignment")

    async def send_receipt(self, request: Request, name: str, number: str) -> Response:
        one = await self._find_submission(request, name, number)
        receipt = await asyncio.to_thread(read_receipt, self.receiver, one)
        return download_response(receipt, f"{name}-{one.number}.receipt.json")

    async def send_report(self, request: Request, name: str, number: str) -> Response:
        one = await self._find_submission(request, name, number)
        bundle = await asyncio.to_thread(find_bundle, self.receiver.directory, one)
        return sandboxed_response(await asyncio.to_thread(read_report, bundle))

    async def _find_submission(self, request: Request, name: str, number: str) -> SubmissionView:
        """Return a submission of the student's own, not a team mate's."""
        _, person, _ = await self.find_seat(request)
        for one in person.hand_ins:
            if (one.assignment, str(one.number), one.by) == (name, number, person.id):
                return one
        raise NotFoundError("this submission does not exist")


def _find_page(snapshot: Snapshot, student: str, seat_name: str) -> Page | None:
    """Return the student and the seat with this name; None if the snapshot has another one."""
    person = snapshot.person_by_id.get(student)
    seat = snapshot.seat_by_key.get(person.seat) if person is not None else None
    if person is None or seat is None or seat.name != seat_name:
        return None
    return snapshot, person, seat

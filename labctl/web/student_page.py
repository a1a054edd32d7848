"""The page for students as an ASGI application: each signed-in student sees their own seat.

No address names a student: the session does. So nobody else's page has an address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from labctl.errors import LabError, NotFoundError, PolicyError, UsageError
from labctl.submissions.receiver import Receiver
from labctl.web.app import CACHE_FOREVER, NO_BUFFER, STREAM
from labctl.web.downloads import SANDBOX, find_bundle, read_report
from labctl.web.live_updates import Feed
from labctl.web.log_streams import LINES as TAIL_LINES
from labctl.web.log_streams import MOST_BYTES, LogStreams
from labctl.web.pages import Pages
from labctl.web.student_access import StudentAccess, session_of
from labctl.web.student_actions import StudentActions
from labctl.web.student_forms import StudentForms
from labctl.web.student_parts import StudentParts
from labctl.web.student_services import (
    JUPYTER,
    OPEN,
    PATHS,
    TENSORBOARD,
    ServiceKey,
    StudentServices,
)
from labctl.web.student_sign_in import StudentSignIn
from labctl.web.view import PersonView, SeatView, Snapshot, SubmissionView

if TYPE_CHECKING:
    from labctl.web.institution_sign_in import InstitutionSignIn

# logs that are open in the browsers of all students together
MOST_LOGS = 40
# how often a page looks whether a service has started
REFRESH_S = 2
TITLES = {JUPYTER: "Jupyter", TENSORBOARD: "TensorBoard"}
Page = tuple[Snapshot, PersonView, SeatView]


class StudentPage:
    """The page for the students of one course. `app` is the application."""

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
        institution: InstitutionSignIn | None = None,
    ) -> None:
        self.feed = feed
        self.pages = pages
        self.access = access
        self.actions = actions
        self.services = services
        self.services_url = services_url
        self._institution = institution
        self.parts = StudentParts(pages, actions, drop, has_services=services is not None)
        self.receiver = Receiver(drop)
        self.log_streams = LogStreams(MOST_LOGS)
        # students without a server, whose page wants a price
        self._price_requests: asyncio.Queue[str] = asyncio.Queue()
        # session id -> messages that its next page shows once: (kind, text)
        self.messages: dict[str, list[tuple[str, str]]] = {}
        self.on_start: list[Callable[[], None]] = []
        self.start_error: Exception | None = None
        self.app = self._build_application(middleware)

    def close(self) -> None:
        self.feed.close()

    def _build_application(self, middleware: Sequence[Middleware]) -> FastAPI:
        app = FastAPI(
            lifespan=self._run_tasks,
            middleware=middleware,
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
        )
        app.add_exception_handler(LabError, self._handle_error)
        app.add_exception_handler(HTTPException, self._handle_http_error)
        pages: dict[str, Callable[..., Any]] = {
            "/": self.show_seat,
            "/events": self.stream_events,
            "/runs/{run}/log": self.stream_log,
            "/submissions/{name}/feedback": self.send_feedback,
            "/submissions/{name}/{number}/receipt": self.send_receipt,
            "/submissions/{name}/{number}/report": self.send_report,
            "/services/{lab_id}/{name}": self.open_service,
            "/static/{path:path}": self.send_static,
        }
        for path, handler in pages.items():
            app.add_api_route(path, handler, methods=["GET"], response_class=Response)
        StudentSignIn(self.pages, self.access, self._institution).add_to(app)
        StudentForms(self).add_to(app)
        return app

    @contextlib.asynccontextmanager
    async def _run_tasks(self, _: FastAPI) -> AsyncIterator[None]:
        works = (
            *(self.feed.run(), self.access.watch()),
            *(self.actions.watch_starts(), self._read_prices()),
        )
        tasks = [asyncio.create_task(work) for work in works]
        for call in self.on_start:
            call()
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
        # These come from our own templates: HTML in which every text is escaped.
        parts = {name: Markup(html) for name, (html, _) in channel.parts.items()}
        since = urlencode({"since": self.feed.version(channel)})
        return self.render_page(
            request,
            snapshot,
            "student",
            person=person,
            seat=seat,
            run=shown_run,
            parts=parts,
            stream=f"/events?{since}",
        )

    def render_page(
        self, request: Request, snapshot: Snapshot, template: str, **values: Any
    ) -> HTMLResponse:
        """Render a template as a page, with the messages that the session has not seen."""
        session = session_of(request)
        # htmx shows only the live part of a page, so it must not take the messages.
        messages = [] if "hx-request" in request.headers else self.messages.pop(session.id, [])
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        frame = {
            "course": snapshot.course,
            "session": session,
            "messages": messages,
            "address": address,
            "stream": "",
        }
        return HTMLResponse(self.pages.render(template, **(frame | values)))

    async def find_seat(self, request: Request) -> Page:
        """Return the student's own person and seat; NotFoundError for one without a seat."""
        snapshot = await self.feed.read_snapshot()
        person = snapshot.person_by_id.get(session_of(request).student)
        seat = snapshot.seat_by_key.get(person.seat) if person is not None else None
        if person is None or seat is None:
            raise NotFoundError("you have no seat in this course", hint="ask your instructor")
        return snapshot, person, seat

    def require_run(self, seat: SeatView, run: str) -> None:
        """Raise NotFoundError if the seat has no such run."""
        if not any(one.id == run for one in seat.runs):
            raise NotFoundError("your seat has no run with this id")

    async def stream_events(self, request: Request, since: str = "") -> Response:
        student = session_of(request).student
        version = request.headers.get("last-event-id") or since
        stream = self.feed.watch(student, self.parts.draw(student), version)
        return StreamingResponse(stream, media_type=STREAM, headers=NO_BUFFER)

    async def stream_log(self, request: Request, run: str) -> Response:
        _, _, seat = await self.find_seat(request)
        self.require_run(seat, run)
        stream = self.log_streams.watch(
            seat.key, run, lambda: self.actions.open_log(seat, run, TAIL_LINES, MOST_BYTES)
        )
        return StreamingResponse(stream, media_type=STREAM, headers=NO_BUFFER)

    async def open_service(self, request: Request, lab_id: str, name: str) -> Response:
        """Lead to a service of one of the student's labs; start it first if needed.

        Only this page's own links get here, since SameOrigin refuses those of others.
        """
        _, person, seat = await self.find_seat(request)
        if self.services is None or name not in PATHS:
            raise NotFoundError("this page does not exist")
        key = ServiceKey(seat=seat.name, lab_id=lab_id, name=name)
        if await asyncio.to_thread(self.services.ensure, person.id, key):
            data = {**request.session, "lab": lab_id, "name": name}
            ticket = urlencode({"ticket": self.services.issue_ticket(data)})
            return RedirectResponse(f"{self.services_url}{OPEN}?{ticket}", 303)
        lines = ["The first time, this can take some minutes. This page then leads you there."]
        page = await self._render_message(request, f"Starting {TITLES[name]}", lines, 200)
        page.headers["refresh"] = str(REFRESH_S)
        return page

    # work

    async def send_feedback(self, request: Request, name: str) -> Response:
        snapshot, person, _ = await self.find_seat(request)
        if name in {one.name for one in snapshot.assignments}:
            feedback = await asyncio.to_thread(self.receiver.feedback, name, person.id)
            if feedback is not None:
                return _send_sandboxed(feedback.page.encode())
        raise NotFoundError("no feedback was released to you for this assignment")

    async def send_receipt(self, request: Request, name: str, number: str) -> Response:
        one = await self._find_submission(request, name, number)
        receipts = await asyncio.to_thread(self.receiver.receipts, name, one.by)
        for signed in receipts:
            if signed.receipt.number == one.number:
                filename = f"{name}-{one.number}.receipt.json"
                headers = {"content-disposition": f'attachment; filename="{filename}"'}
                content = msgspec.json.format(msgspec.json.encode(signed))
                return Response(content, media_type="application/json", headers=headers)
        raise NotFoundError("this receipt does not exist")

    async def send_report(self, request: Request, name: str, number: str) -> Response:
        one = await self._find_submission(request, name, number)
        bundle = await asyncio.to_thread(find_bundle, self.receiver.directory, one)
        return _send_sandboxed(await asyncio.to_thread(read_report, bundle))

    async def _find_submission(self, request: Request, name: str, number: str) -> SubmissionView:
        """Return a submission of the student's own, not a team mate's."""
        _, person, _ = await self.find_seat(request)
        for one in person.hand_ins:
            if (one.assignment, str(one.number), one.by) == (name, number, person.id):
                return one
        raise NotFoundError("this submission does not exist")

    # files and errors

    async def send_static(self, path: str) -> Response:
        content, kind = self.pages.static.get(f"/static/{path}", (b"", ""))
        if not kind:
            raise HTTPException(404)
        return Response(content, media_type=kind, headers=CACHE_FOREVER)

    async def _handle_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, LabError)
        kinds = {NotFoundError: 404, UsageError: 400, PolicyError: 403}
        status = next((code for kind, code in kinds.items() if isinstance(error, kind)), 503)
        # Errors of the course's files have paths of this machine: staff reads them.
        lines = [error.why] if status < 500 and error.why else []
        return await self._render_message(request, error.what, lines, status)

    async def _handle_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await self._render_message(
            request, "this page does not exist", [], error.status_code
        )

    async def _render_message(
        self, request: Request, what: str, lines: list[str], status: int
    ) -> Response:
        try:
            snapshot = await self.feed.read_snapshot()
        except LabError:
            return Response("labctl: the course cannot be read now\n", 503, media_type="text/plain")
        title = what[:1].upper() + what[1:]
        page = self.render_page(request, snapshot, "student_message", title=title, lines=lines)
        page.status_code = status
        return page


def _send_sandboxed(page: bytes) -> Response:
    headers = {"content-security-policy": SANDBOX}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)

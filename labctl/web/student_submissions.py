"""Submitting from the server on the page for students, and asking for a regrade.

A student chooses a run or a lab, sees the bundle that the keeper made of it, and confirms.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.lateness import compute_free_days, reduce_penalty
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.free_days import FreeDays
from labctl.courses.records.regrade_requests import MOST_REQUESTS
from labctl.courses.regrades import RegradeDesk
from labctl.courses.server_submissions import Choice, Draft, ServerSubmissions
from labctl.errors import LabError, NotFoundError
from labctl.model import Value
from labctl.submissions.assignment import count_late_days
from labctl.submissions.receiver import Hello, Receiver
from labctl.web.course_site import describe_failure
from labctl.web.formatting import format_time, span
from labctl.web.request_state import form_of
from labctl.web.student_access import session_of
from labctl.web.student_parts import is_usable
from labctl.web.submission_list import parse_received_at
from labctl.web.view import AssignmentView, PersonView, SeatView
from labctl.web.web_site import add_routes
from labctl.wire.receiver import MOST_REGRADE_CHARS

if TYPE_CHECKING:
    from labctl.web.student_page import StudentPage

NEW, SUBMIT = "/submissions/{name}/new", "/submissions/{name}/submit"
REGRADE = "/submissions/{name}/regrade"
# how often a page looks whether a draft is ready
REFRESH_S = 2
# bundles that are sent to the receiver at the same time; each is examined there
MOST_SENDING = 4
RUN, LAB = "run:", "lab:"


class SubmissionTerms(Value, frozen=True):
    """What applies to a submission that arrives now. `penalty` is what free days leave of it."""

    hello: Hello
    require: tuple[str, ...]
    free_days: FreeDays = FreeDays()
    penalty: int = 0


class StudentSubmissions:
    """The routes for submissions and regrades of the student who is signed in."""

    def __init__(self, page: StudentPage, submissions: ServerSubmissions) -> None:
        self._page = page
        self._path = submissions.course
        self._submissions = submissions
        # Of its own: a whole class that submits at the due time must not stop the other pages.
        self._sending = ThreadPoolExecutor(MOST_SENDING, thread_name_prefix="submit")

    def add_to(self, app: FastAPI) -> None:
        add_routes(app, "GET", {NEW: self.show_draft, REGRADE: self.show_regrade})
        routes = {NEW: self.begin, SUBMIT: self.submit, REGRADE: self.ask_regrade}
        add_routes(app, "POST", routes)

    async def show_draft(self, request: Request, name: str, again: str = "") -> Response:
        """Show the draft, or what can be submitted."""
        due, person, seat = await self._find_assignment(request, name)
        draft = None if again else self._submissions.find(person.id, due.name)
        if draft is not None and draft.prepared is None:
            lines = ["The course's keeper downloads them from your server and checks them."]
            page = await self._page.render_message(request, "Collecting your files", lines)
            page.headers["refresh"] = str(REFRESH_S)
            return page
        terms = await asyncio.to_thread(read_terms, self._path, due.name, person.id)
        return await self._render(request, due, person, seat, draft, terms)

    async def _render(
        self,
        request: Request,
        due: AssignmentView,
        person: PersonView,
        seat: SeatView,
        draft: Draft | None,
        terms: SubmissionTerms,
    ) -> Response:
        standing = self._page.actions.find_standing(person.id, seat)
        is_up = is_usable(standing, seat)
        return self._page.render_page(
            request,
            await self._page.feed.read_snapshot(),
            "student_submission",
            due=due,
            draft=draft,
            terms=terms,
            runs=seat.runs if is_up else (),
            labs=standing.labs if is_up else (),
        )

    async def begin(self, request: Request, name: str) -> Response:
        due, person, seat = await self._find_assignment(request, name)
        choice = self._read_choice(form_of(request).get("source", ""), due, person, seat)
        try:
            await asyncio.to_thread(self._submissions.begin, person.id, seat.name, choice)
        except LabError as error:
            return await self._page.redirect_with_message(
                request, "/", "bad", describe_failure(error)
            )
        return RedirectResponse(f"/submissions/{due.name}/new", 303)

    def _read_choice(
        self, source: str, due: AssignmentView, person: PersonView, seat: SeatView
    ) -> Choice:
        """Return what the form names; NotFoundError if it is not the student's."""
        if source.startswith(RUN):
            run = source.removeprefix(RUN)
            self._page.require_run(seat, run)
            return Choice(assignment=due.name, run=run)
        lab_id = source.removeprefix(LAB)
        labs = dict(self._page.actions.find_standing(person.id, seat).labs)
        if lab_id not in labs:
            raise NotFoundError("you have no such lab on your server")
        return Choice(assignment=due.name, lab_id=lab_id)

    async def submit(self, request: Request, name: str) -> Response:
        due, person, _ = await self._find_assignment(request, name)
        draft = form_of(request).get("draft", "")
        try:
            signed = await asyncio.get_running_loop().run_in_executor(
                self._sending, self._submissions.submit, person.id, due.name, draft
            )
        except LabError as error:
            return await self._page.redirect_with_message(
                request, "/", "bad", f"Nothing was submitted. {describe_failure(error)}"
            )
        receipt = signed.receipt
        # Without the penalty: the receipt does not know of free days, which may cancel it.
        late = f", {span(receipt.late_s)} late" if receipt.late_s else ""
        received = format_time(parse_received_at(receipt.received), due.zone)
        text = (
            f"{due.name} is submitted: number {receipt.number}, received {received}{late}. "
            "Download its receipt below, and keep it."
        )
        return await self._page.redirect_with_message(request, "/", "good", text)

    async def show_regrade(self, request: Request, name: str) -> Response:
        due, person, _ = await self._find_assignment(request, name)
        return self._page.render_page(
            request,
            await self._page.feed.read_snapshot(),
            "student_regrade",
            due=due,
            regrades=person.list_regrades(due.name),
            most_chars=MOST_REGRADE_CHARS,
            most_requests=MOST_REQUESTS,
        )

    async def ask_regrade(self, request: Request, name: str) -> Response:
        due, person, _ = await self._find_assignment(request, name)
        text = form_of(request).get("text", "")

        def record() -> None:
            RegradeDesk(CourseFolder(self._path)).record_request(due.name, person.id, text)

        kind, message = "good", f"Your request for {due.name} was sent to staff."
        try:
            await asyncio.to_thread(record)
        except LabError as error:
            kind, message = "bad", describe_failure(error)
        return await self._page.redirect_with_message(request, "/", kind, message)

    async def _find_assignment(
        self, request: Request, name: str
    ) -> tuple[AssignmentView, PersonView, SeatView]:
        """Return an assignment of the course and the student; NotFoundError for another name."""
        snapshot, person, seat = await self._page.find_seat(request)
        for due in snapshot.assignments:
            if due.name == name:
                assert person.id == session_of(request).student
                return due, person, seat
        raise NotFoundError("this assignment does not exist")


def read_terms(path: Path, assignment: str, student: str) -> SubmissionTerms:
    """Read what applies to a submission of this student that arrives now.

    NotFoundError if the assignment was not published to the receiver.
    """
    folder = CourseFolder(path)
    receiver = Receiver(folder.drop)
    rules, hello = receiver.load_rules(assignment), receiver.hello(assignment, student)
    terms = SubmissionTerms(hello=hello, require=rules.require, penalty=hello.rules.penalty)
    own = folder.config.assignments.get(assignment)
    late_s = hello.rules.late_s
    if own is None or not late_s:
        return terms
    for seat in list_assignment_seats(folder, assignment):
        if student in seat.students:
            days = {seat.name: count_late_days(late_s, own.grace)}
            free = compute_free_days(folder, assignment, days).get(seat.name, FreeDays())
            penalty = reduce_penalty(own, late_s, free)
            return SubmissionTerms(
                hello=hello, require=rules.require, free_days=free, penalty=penalty
            )
    return terms

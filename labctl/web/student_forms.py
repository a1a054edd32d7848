"""The forms of the page for students: start, extend and end the server, cancel a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from labctl.errors import LabError, NotFoundError
from labctl.sync.starter_update import FileChange
from labctl.text import names_text, price_or_free_text, price_text
from labctl.web.course_site import describe_failure
from labctl.web.formatting import span, usd
from labctl.web.forms import parse_span
from labctl.web.request_state import form_of
from labctl.web.student_access import session_of
from labctl.web.student_parts import can_write_files
from labctl.web.view import SeatView
from labctl.web.web_site import Routes, add_routes

if TYPE_CHECKING:
    from labctl.web.student_page import StudentPage

START, EXTEND, END, CANCEL = "/server/start", "/server/extend", "/server/end", "/runs/{run}/cancel"
FILES = "/assignments/{name}/files"
# files of a student that a message names
MOST_NAMED = 5


class StudentForms:
    """The routes that act for a student. Each has a page that asks for confirmation first."""

    def __init__(self, page: StudentPage) -> None:
        self._page = page

    def add_to(self, app: FastAPI) -> None:
        questions: Routes = {
            START: self.ask_start,
            EXTEND: self.ask_extend,
            END: self.ask_end,
            CANCEL: self.ask_cancel,
            FILES: self.ask_files,
        }
        actions: Routes = {
            START: self.start,
            EXTEND: self.extend,
            END: self.end,
            CANCEL: self.cancel,
            FILES: self.write_files,
        }
        add_routes(app, "GET", questions)
        add_routes(app, "POST", actions)

    async def ask_start(self, request: Request) -> Response:
        _, person, seat = await self._page.find_seat(request)
        if self._page.actions.needs_offer(seat):
            with contextlib.suppress(LabError):  # without a price, the page does not show it
                await asyncio.to_thread(self._page.actions.read_offer, person.id)
        budget = self._page.parts.compute_budget(seat)
        is_up = seat.machine is not None and seat.machine.bills
        offer = self._page.actions.find_offer()
        lines = [
            "The server that runs now becomes yours to use, extend and end."
            if is_up
            else "The server starts within some minutes. It ends at the course's time limit, when "
            "your budget is used up, or when you end it."
        ]
        if offer is not None and not is_up:
            gpu = f" with {offer.gpu_name}" if offer.gpu_name else ""
            price = price_or_free_text(offer.price_usd_per_hour)
            lines.append(f"{offer.type}{gpu}, {price}.")
        if budget.left_s is not None:
            lines.append(f"Your budget still buys {span(budget.left_s)} of it.")
        title = "Use this server?" if is_up else "Start your server?"
        yes = "Use the server" if is_up else "Start the server"
        return await self._page.render_question(request, title, lines, START, yes)

    async def ask_extend(self, request: Request, by: str = "1h") -> Response:
        _, _, seat = await self._page.find_seat(request)
        span_s = parse_span(by)
        lines = [f"The server will end {span(span_s)} later."]
        if seat.machine is not None and seat.machine.usd_per_hour:
            lines.append(f"This costs at most {usd(seat.machine.usd_per_hour * span_s / 3600)}.")
        title = f"Extend your server by {span(span_s)}?"
        yes = f"Extend by {span(span_s)}"
        return await self._page.render_question(request, title, lines, EXTEND, yes, by=by)

    async def start(self, request: Request) -> Response:
        student = session_of(request).student
        return await self._act(request, lambda: self._page.actions.start(student))

    async def extend(self, request: Request) -> Response:
        student = session_of(request).student
        span_s = parse_span(form_of(request).get("by", ""))
        return await self._act(
            request,
            lambda: self._page.actions.extend(student, span_s),
            f"Extended by {span(span_s)}.",
        )

    async def ask_end(self, request: Request) -> Response:
        _, person, seat = await self._page.find_seat(request)
        labs = [name for _, name in self._page.actions.find_standing(person.id, seat).labs]
        lines = [
            "Active runs are stopped. Each has a minute to write a checkpoint. Then results are "
            "saved in the course's folder; ask your instructor for them.",
            "Everything else on the server is deleted, such as files outside your lab's directory.",
        ]
        if len(labs) > 1:
            lines.append(f"This ends it for all your labs: {', '.join(labs)}.")
        if seat.team:
            lines.append("It continues to run as long as a member of your team uses it.")
        return await self._page.render_question(
            request, "End your server?", lines, END, "End the server"
        )

    async def end(self, request: Request) -> Response:
        student = session_of(request).student
        return await self._act(request, lambda: self._page.actions.end(student))

    async def ask_cancel(self, request: Request, run: str) -> Response:
        _, _, seat = await self._page.find_seat(request)
        self._page.require_run(seat, run)
        price = seat.machine.usd_per_hour if seat.machine else 0.0
        cost = f", at {price_text(price)}" if price else ""
        lines = [
            "The run is stopped. It has a minute to write a checkpoint. "
            f"Its files stay on the server, which keeps running{cost}."
        ]
        title, action = f"Cancel run {run}?", f"/runs/{run}/cancel"
        return await self._page.render_question(request, title, lines, action, "Cancel the run")

    async def cancel(self, request: Request, run: str) -> Response:
        _, person, seat = await self._page.find_seat(request)
        self._page.require_run(seat, run)

        def cancel() -> str:
            ended, had_ended = self._page.actions.cancel(person.id, seat, run)
            event = f"Run {run} had already ended" if had_ended else f"Run {run} was canceled"
            return f"{event}: {ended.summary or ended.state_text}."

        return await self._act(request, cancel)

    async def ask_files(self, request: Request, name: str) -> Response:
        await self._require_starter(request, name)
        lines = [
            "They are written to /lab/code, where Jupyter shows them.",
            "Files that you changed stay as they are.",
        ]
        title, action = f"Get the files of {name}?", f"/assignments/{name}/files"
        return await self._page.render_question(request, title, lines, action, "Get the files")

    async def write_files(self, request: Request, name: str) -> Response:
        seat = await self._require_starter(request, name)

        def write() -> str:
            changes = self._page.actions.write_starter(seat, name)
            return describe_files(name, changes)

        return await self._act(request, write)

    async def _require_starter(self, request: Request, name: str) -> SeatView:
        """Return the student's seat; NotFoundError if there is nothing to write, or nowhere."""
        snapshot, person, seat = await self._page.find_seat(request)
        if not any(due.name == name and due.has_starter for due in snapshot.assignments):
            raise NotFoundError("this assignment hands out no files")
        if not can_write_files(self._page.actions.find_standing(person.id, seat), seat):
            raise NotFoundError("you have no server now", hint="start it on your page")
        return seat

    async def _act(
        self, request: Request, action: Callable[[], str | None], message: str = ""
    ) -> Response:
        """Run an action in a thread; the page then shows its message, or why it failed.

        A server that starts or ends needs no message: the page's live part shows that, until it is
        over.
        """
        kind = "good"
        try:
            result = await asyncio.to_thread(action)
            message = result or message
        except LabError as error:
            kind, message = "bad", describe_failure(error)
        return await self._page.redirect_with_message(request, "/", kind, message)


def describe_files(assignment: str, changes: Sequence[FileChange]) -> str:
    """Return where an assignment's files are, and which of the student's stay."""
    own = [change.path for change in changes if change.action in ("kept", "conflict", "blocked")]
    if not own:
        return f"The files of {assignment} are in /lab/code. Open Jupyter to use them."
    stay = names_text(own, MOST_NAMED)
    text = f"The files of {assignment} are in /lab/code, but yours stay as they are: {stay}."
    if beside := [change.beside for change in changes if change.beside]:
        text += f" The course's versions of them: {names_text(beside, MOST_NAMED)}."
    return text

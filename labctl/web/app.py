"""The dashboard as an ASGI application: its routes and their handlers.

Addresses contain keys (pseudonyms) and the names of assignments and runs, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import FileResponse, RedirectResponse, Response
from starlette.middleware import Middleware

from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.model import Value
from labctl.submissions.receiver import Receiver
from labctl.web.auth import LoginLink
from labctl.web.course_site import CourseSite, list_parts, stream_response
from labctl.web.downloads import (
    download_response,
    find_bundle,
    read_receipt,
    read_report,
    sandboxed_response,
)
from labctl.web.forms import ActionForms
from labctl.web.listing import PERSON_COLUMNS, PERSON_MARKS, SEAT_COLUMNS, SEAT_MARKS, ListView
from labctl.web.live_updates import Draw, Feed
from labctl.web.log_streams import LINES as TAIL_LINES
from labctl.web.log_streams import MOST_BYTES, LogStreams
from labctl.web.mutations import CourseActions, LogReader
from labctl.web.pages import Pages, find_next_due
from labctl.web.pseudonyms import Pseudonyms
from labctl.web.request_state import form_of, pseudonyms_of, sanitize_path, session_of
from labctl.web.server_load import LoadReader
from labctl.web.view import SeatView, Snapshot, SubmissionView
from labctl.web.web_site import Routes, add_routes

# assignments that are drawn before the dashboard answers: the last ones of course.yaml
MOST_PREPARED = 8
# prefixes of the ids of a list's rows: seats and persons
ROWS = ("s-", "p-")
# kind of page -> the marks and the columns of its list
LISTS = {
    "board": (tuple(dict(SEAT_MARKS)), SEAT_COLUMNS),
    "assignments": (tuple(dict(PERSON_MARKS)), PERSON_COLUMNS),
}


class PageView(Value, frozen=True):
    """An open page: which one, whether names are hidden, and the view of its list."""

    page: str
    pseudonyms: Pseudonyms
    listing: ListView = ListView()

    @property
    def channel(self) -> str:
        names = "hidden" if self.pseudonyms.hidden else "named"
        return " ".join(filter(None, (self.page, names, self.listing.query)))


class Dashboard(CourseSite):
    """The dashboard of one course; `drop` is the receiver's directory."""

    base, home = "base.html.j2", "Everybody"

    def __init__(
        self,
        feed: Feed,
        pages: Pages,
        link: LoginLink,
        actions: CourseActions,
        load_reader: LoadReader,
        drop: Path,
        middleware: Sequence[Middleware],
    ) -> None:
        super().__init__(feed, pages, middleware)
        self.load_reader = load_reader
        self.link = link
        self.actions = actions
        self.drop = drop
        self.log_streams = LogStreams()
        routes: Routes = {
            "/": self.show_board,
            "/costs": self.show_costs,
            "/regrades": self.show_regrades,
            "/another": self.show_login_link,
            "/assignments/{name}": self.show_assignment,
            "/seats/{key}": self.show_seat,
            "/seats/{key}/runs/{run}/log": self.stream_log,
            "/seats/{key}/handed/{person}/{name}/{number}/report": self.send_report,
            "/seats/{key}/handed/{person}/{name}/{number}/bundle": self.send_bundle,
            "/seats/{key}/handed/{person}/{name}/{number}/receipt": self.send_receipt,
            "/events/{page:path}": self.stream_events,
        }
        add_routes(self.app, "GET", routes)
        add_routes(self.app, "POST", {"/names": self.set_names_hidden})
        ActionForms(self).add_to(self.app)

    def list_tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().list_tasks(), self.load_reader.run(self.feed)]

    async def prepare(self) -> None:
        """Draw the pages of lists in advance, so that nobody waits for them."""
        with contextlib.suppress(LabError):  # the page shows it
            snapshot = await self.feed.read_snapshot()
            names = [f"assignments/{one.name}" for one in snapshot.assignments[-MOST_PREPARED:]]
            seats = [f"seats/{seat.key}" for seat in snapshot.seats[:1]]
            for page in ("board", "costs", "regrades", *names, *seats):
                view = PageView(page=page, pseudonyms=Pseudonyms())
                await self.feed.open_channel(view.channel, self._choose_renderer(view))
        self.feed.forget_cost()

    def describe_frame(self, request: Request, snapshot: Snapshot) -> dict[str, object]:
        frame = super().describe_frame(request, snapshot)
        return frame | {
            "assignments": snapshot.assignments,
            "open_regrades": len(snapshot.open_regrades),
            "pseudonyms": pseudonyms_of(request),
            "back": frame["address"],
            "here": "",
        }

    def take_messages(self, request: Request) -> list[tuple[str, str]]:
        pseudonyms = pseudonyms_of(request)
        hint = "The action failed. Show names to read the reason."
        return [
            (kind, pseudonyms.text(text, hint) if kind == "bad" else text)
            for kind, text in super().take_messages(request)
        ]

    def describe_error(
        self, request: Request, what: str, why: str, status: int
    ) -> tuple[str, list[str]]:
        pseudonyms = pseudonyms_of(request)
        lines = [pseudonyms.text(why, "Show names to read the reason.")] if why else []
        return pseudonyms.text(what, "The action failed") if status >= 500 else what, lines

    # pages

    async def show_board(self, request: Request) -> Response:
        return await self._render_live("board", request, "board", here="board")

    async def show_costs(self, request: Request) -> Response:
        return await self._render_live("costs", request, "costs", here="costs")

    async def show_regrades(self, request: Request) -> Response:
        return await self._render_live("regrades", request, "regrades", here="regrades")

    async def show_assignment(self, request: Request, name: str) -> Response:
        page = f"assignments/{name}"
        self._require_page(await self.feed.read_snapshot(), page)
        return await self._render_live("assignment", request, page, title=name, here=name)

    async def show_seat(self, request: Request, key: str, run: str = "") -> Response:
        snapshot = await self.feed.read_snapshot()
        seat = self.find_seat(snapshot, key)
        shown_run = next((one for one in seat.runs if one.id == run), None if run else seat.run)
        if run and shown_run is None:
            raise NotFoundError("this seat has no run with this id")
        title = pseudonyms_of(request).seat(snapshot, seat)
        return await self._render_live(
            "seat", request, f"seats/{key}", title=title, key=key, run=shown_run
        )

    async def show_login_link(self, request: Request) -> Response:
        snapshot = await self.feed.read_snapshot()
        # The dashboard's own port, even if this browser uses a forward with another one.
        url = "" if session_of(request).hidden else self.link.url
        port = self.link.url.partition("/?")[0].rpartition(":")[2]
        return self.render_page(request, snapshot, "another", url=url, port=port)

    async def set_names_hidden(self, request: Request) -> Response:
        form = form_of(request)
        request.session["hidden"] = form.get("hidden") == "yes"
        return RedirectResponse(sanitize_path(form.get("back", "/")), 303)

    async def _render_live(
        self, template: str, request: Request, page: str, **values: Any
    ) -> Response:
        """Render a page that a stream of events keeps up to date."""
        view = self._view(request, page)
        channel = await self.feed.open_channel(view.channel, self._choose_renderer(view))
        assert channel.drawn is not None
        parts = list_parts(channel)
        since = urlencode(view.listing.as_pairs() | {"since": self.feed.version(channel)})
        live_values = {
            "parts": parts,
            "rows": [html for name, html in parts.items() if name.startswith(ROWS)],
            "everybody": len(channel.drawn.seats),
            "view": view.listing,
            "due": find_next_due(channel.drawn),
            "stream": f"/events/{page}?{since}",
            **values,
        }
        return self.render_page(request, channel.drawn, template, **live_values)

    # streams

    async def stream_events(self, request: Request, page: str, since: str = "") -> Response:
        self._require_page(await self.feed.read_snapshot(), page)
        view = self._view(request, page)
        version = request.headers.get("last-event-id") or since
        return stream_response(self.feed.watch(view.channel, self._choose_renderer(view), version))

    async def stream_log(self, request: Request, key: str, run: str) -> Response:
        seat = self.find_seat(await self.feed.read_snapshot(), key)

        def open_() -> LogReader:
            lab, server, latest = self.actions.find_run(seat.name, run)
            return LogReader(lab, server, latest, TAIL_LINES, MOST_BYTES)

        return stream_response(self.log_streams.watch(key, run, open_))

    def _view(self, request: Request, page: str) -> PageView:
        kind = page.partition("/")[0]
        query = request.query_params
        marks, columns = LISTS.get(kind, ((), ()))
        listing = ListView.read(query.get("show", ""), query.get("sort", ""), marks, columns)
        return PageView(page=page, pseudonyms=pseudonyms_of(request), listing=listing)

    def _choose_renderer(self, view: PageView) -> Draw:
        kind, _, name = view.page.partition("/")
        if kind == "seats":
            return self.pages.seat(name, view.pseudonyms)
        if kind == "assignments":
            return self.pages.assignment(name, view.pseudonyms, view.listing)
        if kind == "costs":
            return self.pages.costs(view.pseudonyms)
        if kind == "regrades":
            return self.pages.regrades(view.pseudonyms)
        return self.pages.board(view.pseudonyms, view.listing)

    def _require_page(self, snapshot: Snapshot, page: str) -> None:
        """Raise NotFoundError if the page does not exist."""
        kind, _, name = page.partition("/")
        exists = {
            "board": not name,
            "costs": not name,
            "regrades": not name,
            "seats": name in snapshot.seat_by_key,
            "assignments": any(one.name == name for one in snapshot.assignments),
        }
        if not exists.get(kind, False):
            raise NotFoundError("this page does not exist in this course")

    # submissions

    async def send_report(
        self, request: Request, key: str, person: str, name: str, number: str
    ) -> Response:
        submission = await self._find_submission(key, person, name, number)
        bundle = await asyncio.to_thread(find_bundle, self.drop, submission)
        return sandboxed_response(await asyncio.to_thread(read_report, bundle))

    async def send_bundle(
        self, request: Request, key: str, person: str, name: str, number: str
    ) -> Response:
        submission = await self._find_submission(key, person, name, number)
        bundle = await asyncio.to_thread(find_bundle, self.drop, submission)
        filename = f"{name}-{person}-{submission.number}.tar"
        return FileResponse(bundle, media_type="application/x-tar", filename=filename)

    async def send_receipt(
        self, request: Request, key: str, person: str, name: str, number: str
    ) -> Response:
        if session_of(request).hidden:
            raise PolicyError("a receipt names the student; show names first")
        submission = await self._find_submission(key, person, name, number)
        receipt = await asyncio.to_thread(read_receipt, Receiver(self.drop), submission)
        return download_response(receipt, f"{name}-{person}-{submission.number}.receipt.json")

    async def _find_submission(
        self, key: str, person: str, name: str, number: str
    ) -> SubmissionView:
        snapshot = await self.feed.read_snapshot()
        seat = self.find_seat(snapshot, key)
        people = [snapshot.person_by_id[student] for student in seat.students]
        for submission in {one for mate in people for one in mate.hand_ins}:
            identity = (submission.by_key, submission.assignment, str(submission.number))
            if identity == (person, name, number):
                return submission
        raise NotFoundError("this submission does not exist")

    def find_seat(self, snapshot: Snapshot, key: str) -> SeatView:
        """Return the seat with this key; NotFoundError for an unknown key."""
        seat = snapshot.seat_by_key.get(key)
        if seat is None:
            raise NotFoundError("this seat does not exist in this course")
        return seat

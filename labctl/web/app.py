"""The dashboard as an ASGI application: every address, and what stands behind it.

Addresses hold keys (pseudonyms), assignments' and runs' names, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI, Request
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from labctl.errors import LabError, NotFoundError, UsageError
from labctl.model import Value
from labctl.web.auth import LoginLink
from labctl.web.downloads import SANDBOX, bundle_of, report_of
from labctl.web.forms import Asked
from labctl.web.listing import PERSON_COLUMNS, PERSON_MARKS, SEAT_COLUMNS, SEAT_MARKS, ListView
from labctl.web.live_updates import Draw, Feed
from labctl.web.log_streams import LINES as TAIL_LINES
from labctl.web.log_streams import MOST_BYTES, Tails
from labctl.web.mutations import Deeds, Reading
from labctl.web.pages import Pages, next_due
from labctl.web.pseudonyms import Lens
from labctl.web.request_state import form_of, lens_of, own_path, session_of
from labctl.web.server_load import Gauges
from labctl.web.view import Seat, Snapshot

STREAM = "text/event-stream"
NO_BUFFER = {"x-accel-buffering": "no"}
FOR_EVER = {"cache-control": "private, max-age=31536000, immutable"}
# How the ids of a list's rows begin.
ROWS = ("s-", "p-")
LISTS = {
    "board": (tuple(dict(SEAT_MARKS)), SEAT_COLUMNS),
    "assignments": (tuple(dict(PERSON_MARKS)), PERSON_COLUMNS),
}


class PageView(Value, frozen=True):
    """A page as somebody has it open: which, through which lens, and what of a list."""

    page: str
    lens: Lens
    listing: ListView = ListView()

    @property
    def channel(self) -> str:
        who = "hidden" if self.lens.hidden else "named"
        return " ".join(filter(None, (self.page, who, self.listing.query)))


class Dashboard:
    """One course's. `app` is the application; `drop` the receiver's directory."""

    def __init__(
        self,
        feed: Feed,
        pages: Pages,
        link: LoginLink,
        deeds: Deeds,
        gauges: Gauges,
        drop: Path,
        middleware: Sequence[Middleware],
    ) -> None:
        self.feed = feed
        self.gauges = gauges
        self.pages = pages
        self.link = link
        self.deeds = deeds
        self.drop = drop
        self.tails = Tails()
        # Session's id -> what its next page says once, and in which color.
        self.messages: dict[str, list[tuple[str, str]]] = {}
        self.on_start: list[Callable[[], None]] = []
        self.app = self._application(middleware)

    def _application(self, middleware: Sequence[Middleware]) -> FastAPI:
        app = FastAPI(
            lifespan=self._life,
            middleware=middleware,
            # No pages of documentation: they fetch scripts from elsewhere.
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
        )
        app.add_exception_handler(LabError, self._failed)
        app.add_exception_handler(HTTPException, self._absent)
        pages: dict[str, Callable[..., Any]] = {
            "/": self.board,
            "/costs": self.costs,
            "/another": self.another,
            "/assignments/{name}": self.assignment,
            "/seats/{key}": self.seat,
            "/seats/{key}/runs/{run}/log": self.log,
            "/seats/{key}/handed/{person}/{name}/{number}/report": self.report,
            "/seats/{key}/handed/{person}/{name}/{number}/bundle": self.bundle,
            "/events/{page:path}": self.events,
            "/static/{path:path}": self.static,
        }
        for path, found in pages.items():
            app.add_api_route(path, found, methods=["GET"], response_class=Response)
        app.add_api_route("/names", self.names, methods=["POST"], response_class=Response)
        Asked(self).add_to(app)
        return app

    @contextlib.asynccontextmanager
    async def _life(self, _: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self.feed.run()),
            asyncio.create_task(self.gauges.run(self.feed)),
        ]
        with contextlib.suppress(LabError):
            # The first who asks does not wait for it.
            first = PageView(page="board", lens=Lens())
            await self.feed.page(first.channel, self._draw(first))
        for one in self.on_start:
            one()
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # pages

    async def board(self, request: Request) -> Response:
        return await self._page("board", request, "board", {"here": "board"})

    async def costs(self, request: Request) -> Response:
        return await self._page("costs", request, "costs", {"here": "costs"})

    async def assignment(self, request: Request, name: str) -> Response:
        page = f"assignments/{name}"
        self._check(await self.feed.snapshot(), page)
        return await self._page("assignment", request, page, {"title": name, "here": name})

    async def seat(self, request: Request, key: str, run: str = "") -> Response:
        snapshot = await self.feed.snapshot()
        seat = self.seat_of(snapshot, key)
        shown = next((one for one in seat.runs if one.id == run), None if run else seat.run)
        if run and shown is None:
            raise NotFoundError("this seat has no such run")
        title = lens_of(request).seat(snapshot, seat)
        more = {"title": title, "key": key, "run": shown}
        return await self._page("seat", request, f"seats/{key}", more)

    async def another(self, request: Request) -> Response:
        snapshot = await self.feed.snapshot()
        # By the port that the dashboard has, whatever forward this browser came through.
        url = "" if session_of(request).hidden else self.link.url
        port = self.link.url.partition("/?")[0].rpartition(":")[2]
        return self.told(request, snapshot, "another", url=url, port=port)

    async def names(self, request: Request) -> Response:
        form = form_of(request)
        request.session["hidden"] = form.get("hidden") == "yes"
        return RedirectResponse(own_path(form.get("back", "/")), 303)

    async def _page(
        self, template: str, request: Request, page: str, more: dict[str, Any]
    ) -> Response:
        view = self._view(request, page)
        channel = await self.feed.page(view.channel, self._draw(view))
        assert channel.drawn is not None
        # Our own templates made these: they are HTML, with every text in them escaped.
        parts = {name: Markup(html) for name, (html, _) in channel.parts.items()}
        since = urlencode(view.listing.as_pairs() | {"since": self.feed.version(channel)})
        values = {
            "parts": parts,
            "rows": [html for name, html in parts.items() if name.startswith(ROWS)],
            "everybody": len(channel.drawn.seats),
            "view": view.listing,
            "due": next_due(channel.drawn),
            "stream": f"/events/{page}?{since}",
            **more,
        }
        return self.told(request, channel.drawn, template, **values)

    def told(self, request: Request, snapshot: Snapshot, template: str, **values: Any) -> Response:
        """A page that is made of a template; what was to be said once is said on it."""
        session = session_of(request)
        # Of a page that htmx asks for, only the live part is shown.
        said = [] if "hx-request" in request.headers else self.messages.pop(session.id, [])
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        frame = {
            "course": snapshot.course,
            "assignments": snapshot.assignments,
            "session": session,
            "lens": Lens(hidden=session.hidden),
            "said": said,
            "address": address,
            "back": address,
            "here": "",
            "stream": "",
        }
        return HTMLResponse(self.pages.render(template, **(frame | values)))

    # what changes

    async def events(self, request: Request, page: str, since: str = "") -> Response:
        self._check(await self.feed.snapshot(), page)
        view = self._view(request, page)
        seen = request.headers.get("last-event-id") or since
        stream = self.feed.watch(view.channel, self._draw(view), seen)
        return StreamingResponse(stream, media_type=STREAM, headers=NO_BUFFER)

    async def log(self, request: Request, key: str, run: str) -> Response:
        seat = self.seat_of(await self.feed.snapshot(), key)

        def open_() -> Reading:
            lab, server, found = self.deeds.run_of(seat.name, run)
            return Reading(lab, server, found, TAIL_LINES, MOST_BYTES)

        stream = self.tails.watch(key, run, open_)
        return StreamingResponse(stream, media_type=STREAM, headers=NO_BUFFER)

    def _view(self, request: Request, page: str) -> PageView:
        kind = page.partition("/")[0]
        asked = request.query_params
        marks, columns = LISTS.get(kind, ((), ()))
        listing = ListView.read(asked.get("show", ""), asked.get("sort", ""), marks, columns)
        return PageView(page=page, lens=lens_of(request), listing=listing)

    def _draw(self, view: PageView) -> Draw:
        kind, _, name = view.page.partition("/")
        if kind == "seats":
            return self.pages.seat(name, view.lens)
        if kind == "assignments":
            return self.pages.assignment(name, view.lens, view.listing)
        if kind == "costs":
            return self.pages.costs(view.lens)
        return self.pages.board(view.lens, view.listing)

    def _check(self, snapshot: Snapshot, page: str) -> None:
        """NotFoundError where there is no such page."""
        kind, _, name = page.partition("/")
        known = {
            "board": not name,
            "costs": not name,
            "seats": name in snapshot.seat_by_key,
            "assignments": any(one.name == name for one in snapshot.assignments),
        }
        if not known.get(kind, False):
            raise NotFoundError("there is no such page in this course")

    # what was handed in

    async def report(
        self, request: Request, key: str, person: str, name: str, number: str
    ) -> Response:
        bundle = await self._bundle(key, person, name, number)
        content = await asyncio.to_thread(report_of, bundle)
        return Response(
            content,
            media_type="text/html; charset=utf-8",
            headers={"content-security-policy": SANDBOX},
        )

    async def bundle(
        self, request: Request, key: str, person: str, name: str, number: str
    ) -> Response:
        found = await self._bundle(key, person, name, number)
        named = f"{name}-{person}-{int(number)}.tar"
        return FileResponse(found, media_type="application/x-tar", filename=named)

    async def _bundle(self, key: str, person: str, name: str, number: str) -> Path:
        snapshot = await self.feed.snapshot()
        seat = self.seat_of(snapshot, key)
        people = [snapshot.person_by_id[one] for one in seat.students]
        for one in {one for mate in people for one in mate.hand_ins}:
            if (one.by_key, one.assignment, str(one.number)) == (person, name, number):
                return await asyncio.to_thread(bundle_of, self.drop, one)
        raise NotFoundError("there is no such submission")

    def seat_of(self, snapshot: Snapshot, key: str) -> Seat:
        found = snapshot.seat_by_key.get(key)
        if found is None:
            raise NotFoundError("there is no such seat in this course")
        return found

    # the rest

    async def static(self, path: str) -> Response:
        content, kind = self.pages.static.get(f"/static/{path}", (b"", ""))
        if not kind:
            raise HTTPException(404)
        return Response(content, media_type=kind, headers=FOR_EVER)

    async def _failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, LabError)
        kinds = {NotFoundError: 404, UsageError: 400}
        status = next((code for kind, code in kinds.items() if isinstance(error, kind)), 503)
        return await self._said(request, error.what, error.why, status)

    async def _absent(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await self._said(request, "there is no such page", "", error.status_code)

    async def _said(self, request: Request, what: str, why: str, status: int) -> Response:
        try:
            snapshot = await self.feed.snapshot()
        except LabError:
            return Response(f"labctl: {what}\n{why}\n", status, media_type="text/plain")
        lens = lens_of(request)
        lines = [lens.text(why, "Show names to read why.")] if why else []
        title = lens.text(what, "That did not work") if status >= 500 else what
        title = title[:1].upper() + title[1:]
        page = self.told(request, snapshot, "told", title=title, lines=lines, back="/")
        page.status_code = status
        return page

"""The dashboard as an ASGI application: every address, and what stands behind it.

Addresses hold keys (pseudonyms), assignments' and runs' names, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

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
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from labctl.dashboard.asked import Asked
from labctl.dashboard.auth import SESSION_S, LoginLink, RequireSession
from labctl.dashboard.csrf import FormToken, SameOrigin
from labctl.dashboard.deeds import Deeds, Reading
from labctl.dashboard.feed import Channel, Draw, Feed
from labctl.dashboard.gauges import Gauges
from labctl.dashboard.handed import SANDBOX, bundle_of, report_of
from labctl.dashboard.lens import Lens
from labctl.dashboard.pages import Pages, next_due
from labctl.dashboard.requests import form_of, lens_of, own_path, session_of
from labctl.dashboard.responses import SecurityHeaders
from labctl.dashboard.tails import LINES as TAIL_LINES
from labctl.dashboard.tails import MOST_BYTES, Tails
from labctl.dashboard.view import Seat, Snapshot
from labctl.errors import LabError, NotFoundError, UsageError

# By any port: `ssh -L 9000:127.0.0.1:8600` is a way here too.
HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_FORM_BYTES = 16 * 1024
STREAM = "text/event-stream"
NO_BUFFER = {"x-accel-buffering": "no"}
FOR_EVER = {"cache-control": "private, max-age=31536000, immutable"}


def build_middleware(link: LoginLink, key: str, cookie: str) -> list[Middleware]:
    """What stands before every route, the outermost first.

    `cookie` is this course's own name for it: cookies know hosts, not ports. It is not Secure: the
    dashboard speaks plain HTTP, on the loopback alone.
    """
    return [
        Middleware(SecurityHeaders),
        Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        Middleware(SameOrigin),
        Middleware(
            SessionMiddleware,
            secret_key=key,
            session_cookie=cookie,
            max_age=SESSION_S,
            same_site="strict",
        ),
        Middleware(RequireSession, link=link, key=key),
        Middleware(RequestBodyLimitMiddleware, max_body_size=MAX_FORM_BYTES),
        Middleware(FormToken),
    ]


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
            await self._drawn("board", Lens())  # the first who asks does not wait for it
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
        lens = lens_of(request)
        channel, snapshot = await self._drawn("board", lens)
        rows = [html for name, (html, _) in channel.parts.items() if name.startswith("s-")]
        more = {"rows": rows, "due": next_due(snapshot), "here": "board"}
        return self._page("board", request, snapshot, channel, "board", more)

    async def costs(self, request: Request) -> Response:
        channel, snapshot = await self._drawn("costs", lens_of(request))
        return self._page("costs", request, snapshot, channel, "costs", {"here": "costs"})

    async def assignment(self, request: Request, name: str) -> Response:
        page = f"assignments/{name}"
        self._check(await self.feed.snapshot(), page)
        channel, snapshot = await self._drawn(page, lens_of(request))
        rows = [html for part, (html, _) in channel.parts.items() if part.startswith("p-")]
        more = {"rows": rows, "title": name, "here": name}
        return self._page("assignment", request, snapshot, channel, page, more)

    async def seat(self, request: Request, key: str, run: str = "") -> Response:
        page = f"seats/{key}"
        seat = self.seat_of(await self.feed.snapshot(), key)
        channel, snapshot = await self._drawn(page, lens_of(request))
        seat = self.seat_of(snapshot, key)
        shown = next((one for one in seat.runs if one.id == run), None if run else seat.run)
        if run and shown is None:
            raise NotFoundError("this seat has no such run")
        title = lens_of(request).seat(snapshot, seat)
        more = {"title": title, "key": key, "run": shown, "here": ""}
        return self._page("seat", request, snapshot, channel, page, more)

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

    def _page(
        self,
        template: str,
        request: Request,
        snapshot: Snapshot,
        channel: Channel,
        page: str,
        more: dict[str, Any],
    ) -> Response:
        # Our own templates made these: they are HTML, with every text in them escaped.
        parts = {name: Markup(html) for name, (html, _) in channel.parts.items()}
        more["rows"] = [Markup(one) for one in more.get("rows", ())]
        version = f"{self.feed.boot}-{channel.version}"
        values = {"parts": parts, "stream": f"/events/{page}", "version": version, **more}
        return self.told(request, snapshot, template, **values)

    def told(self, request: Request, snapshot: Snapshot, template: str, **values: Any) -> Response:
        """A page that is made of a template; what was to be said once is said on it."""
        session = session_of(request)
        said = self.messages.pop(session.id, [])
        frame = {
            "course": snapshot.course,
            "assignments": snapshot.assignments,
            "session": session,
            "lens": Lens(hidden=session.hidden),
            "said": said,
            "back": request.url.path,
            "here": "",
            "stream": "",
            "version": "",
        }
        return HTMLResponse(self.pages.render(template, **(frame | values)))

    # what changes

    async def events(self, request: Request, page: str, since: str = "") -> Response:
        self._check(await self.feed.snapshot(), page)
        lens = lens_of(request)
        seen = request.headers.get("last-event-id") or since
        stream = self.feed.watch(self._channel(page, lens), self._draw(page, lens), seen)
        return StreamingResponse(stream, media_type=STREAM, headers=NO_BUFFER)

    async def log(self, request: Request, key: str, run: str) -> Response:
        seat = self.seat_of(await self.feed.snapshot(), key)

        def open_() -> Reading:
            lab, server, found = self.deeds.run_of(seat.name, run)
            return Reading(lab, server, found, TAIL_LINES, MOST_BYTES)

        stream = self.tails.watch(key, run, open_)
        return StreamingResponse(stream, media_type=STREAM, headers=NO_BUFFER)

    async def _drawn(self, page: str, lens: Lens) -> tuple[Channel, Snapshot]:
        channel = await self.feed.page(self._channel(page, lens), self._draw(page, lens))
        assert channel.drawn is not None
        return channel, channel.drawn

    def _channel(self, page: str, lens: Lens) -> str:
        return f"{page} {'hidden' if lens.hidden else 'named'}"

    def _draw(self, page: str, lens: Lens) -> Draw:
        kind, _, name = page.partition("/")
        if kind == "seats":
            return self.pages.seat(name, lens)
        if kind == "assignments":
            return self.pages.assignment(name, lens)
        return self.pages.costs(lens) if kind == "costs" else self.pages.board(lens)

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

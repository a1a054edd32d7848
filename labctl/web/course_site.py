"""What the dashboard and the page for students share: a course's pages as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from labctl.errors import LabError, NotFoundError, PolicyError, UsageError
from labctl.web.live_updates import Channel, Feed
from labctl.web.pages import Pages
from labctl.web.request_state import session_of
from labctl.web.view import Snapshot
from labctl.web.web_site import WebSite, add_routes

STREAM = "text/event-stream"
NO_BUFFER = {"x-accel-buffering": "no"}
CACHE_FOREVER = {"cache-control": "private, max-age=31536000, immutable"}


class CourseSite(WebSite):
    """The pages of one course, which a feed keeps up to date.

    A subclass adds its routes and tasks, and the values that all of its templates need.
    """

    # the template that a message or a question extends, and what it calls the first page
    base: ClassVar[str]
    home: ClassVar[str]
    # the status of an error; 503 for any other
    statuses: ClassVar[Mapping[type[LabError], int]] = {
        NotFoundError: 404,
        PolicyError: 403,
        UsageError: 400,
    }

    def __init__(self, feed: Feed, pages: Pages, middleware: Sequence[Middleware]) -> None:
        super().__init__(middleware)
        self.feed = feed
        self.pages = pages
        # session id -> messages that its next page shows once: (kind, text)
        self.messages: dict[str, list[tuple[str, str]]] = {}
        self.app.add_exception_handler(LabError, self._handle_error)
        self.app.add_exception_handler(HTTPException, self._handle_http_error)
        add_routes(self.app, "GET", {"/static/{path:path}": self.send_static})

    def close(self) -> None:
        self.feed.close()

    def list_tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self.feed.run()]

    def describe_frame(self, request: Request, snapshot: Snapshot) -> dict[str, object]:
        """Return what the templates of all pages need."""
        return {
            "course": snapshot.course,
            "session": session_of(request),
            "messages": self.take_messages(request),
            "address": request.url.path + (f"?{request.url.query}" if request.url.query else ""),
            "stream": "",
            "base": self.base,
            "home": self.home,
        }

    def take_messages(self, request: Request) -> list[tuple[str, str]]:
        """Return the messages that this page shows, once."""
        # htmx shows only the live part of a page, so it must not take the messages.
        if "hx-request" in request.headers:
            return []
        return self.messages.pop(session_of(request).id, [])

    def describe_error(
        self, request: Request, what: str, why: str, status: int
    ) -> tuple[str, list[str]]:
        """Return the title and the lines of the page that reports an error."""
        return what, [why] if why else []

    # pages

    def render_page(
        self, request: Request, snapshot: Snapshot, template: str, **values: Any
    ) -> HTMLResponse:
        """Render a template as a page, with the messages that the session has not seen."""
        frame = self.describe_frame(request, snapshot)
        return HTMLResponse(self.pages.render(template, **(frame | values)))

    async def render_message(
        self,
        request: Request,
        title: str,
        lines: Sequence[str],
        status: int = 200,
        *,
        retry: str = "",
    ) -> Response:
        """Render a page that only says something; plain text if the course cannot be read.

        `retry` is the address of what failed, if it can be tried again.
        """
        try:
            snapshot = await self.feed.read_snapshot()
        except LabError:
            text = "\n".join(["labctl: " + title, *lines, ""])
            return Response(text, status, media_type="text/plain; charset=utf-8")
        title = title[:1].upper() + title[1:]
        values = {"title": title, "lines": lines, "retry": retry}
        page = self.render_page(request, snapshot, "message", **values)
        page.status_code = status
        return page

    async def render_question(
        self,
        request: Request,
        title: str,
        lines: Sequence[str],
        action: str,
        yes: str,
        *,
        back: str = "/",
        wants_reason: bool = False,
        **fields: str,
    ) -> Response:
        """Render a page that asks whether to send a form with these fields to `action`."""
        snapshot = await self.feed.read_snapshot()
        return self.render_page(
            request,
            snapshot,
            "confirm",
            title=title,
            lines=lines,
            action=action,
            yes=yes,
            fields=fields,
            back=back,
            wants_reason=wants_reason,
        )

    async def redirect_with_message(
        self, request: Request, address: str, kind: str, text: str
    ) -> Response:
        """Lead to a page that says, once, what an action did; nothing without a text."""
        if text:
            self.messages.setdefault(session_of(request).id, []).append((kind, text))
        await self.feed.renew()
        return RedirectResponse(address, 303)

    async def send_static(self, path: str) -> Response:
        content, kind = self.pages.static.get(f"/static/{path}", (b"", ""))
        if not kind:
            raise HTTPException(404)
        return Response(content, media_type=kind, headers=CACHE_FOREVER)

    async def _handle_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, LabError)
        statuses = self.statuses.items()
        status = next((code for kind, code in statuses if isinstance(error, kind)), 503)
        title, lines = self.describe_error(request, error.what, error.why, status)
        return await self.render_message(request, title, lines, status)

    async def _handle_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await self.render_message(request, "this page does not exist", [], error.status_code)


def list_parts(channel: Channel) -> dict[str, Markup]:
    """Return the parts of a page, which come from our own templates: every text is escaped."""
    return {name: Markup(html) for name, (html, _) in channel.parts.items()}


def stream_response(stream: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(stream, media_type=STREAM, headers=NO_BUFFER)


def describe_failure(error: LabError) -> str:
    """Return what failed and why as sentences, for a message on a page."""
    return " ".join(f"{capitalize(text)}." for text in (error.what, error.why) if text)


def capitalize(text: str) -> str:
    """Begin a sentence with a capital letter; an id at its start, such as hw3, stays as it is."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text

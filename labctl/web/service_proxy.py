"""The origin of students' services: a reverse proxy for HTTP and WebSockets.

What it passes on was written by students or by people whom they trust. So it has an origin of its
own, with a cookie of its own: it cannot read the page for students, which holds the session that
acts. The session here names the student and the lab; no address does.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import httpcore2
import websockets
from fastapi import Request, WebSocket
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from markupsafe import Markup
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, unix_connect

from labctl.web.http_server import MOST_MESSAGE_BYTES
from labctl.web.responses import refuse
from labctl.web.service_connections import FAILURES, make_pool
from labctl.web.student_services import JUPYTER, OPEN, PATHS, TENSORBOARD, TITLES, ServiceKey
from labctl.web.web_site import WebSite, add_routes

if TYPE_CHECKING:
    from labctl.web.student_access import StudentAccess
    from labctl.web.student_services import OpenService, StudentServices

COOKIES = ("labctl-", "__Host-labctl-")
# headers of one connection (RFC 9110, section 7.6.1)
HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
NOT_SENT = HOP | {"host", "authorization", "cookie", "origin", "referer", "forwarded"}
# what would reach beyond this origin's pages, or outlive the session
NOT_RETURNED = HOP | {
    "alt-svc", "clear-site-data", "date", "server", "service-worker-allowed", "set-cookie",
    "strict-transport-security",
}  # fmt: skip
GUARDS = {
    "content-security-policy": "frame-ancestors 'self'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
CONFIRM_STYLE = """\
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }
body { margin: 0.9rem 2rem; max-width: 40rem }
h1 { font-size: 1.7rem; line-height: 1.15 }
button { font: inherit; font-weight: 650; padding: 0.4rem 1rem }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(CONFIRM_STYLE.encode()).digest()).decode()
CONFIRM_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
CONFIRM = Markup(
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>labctl</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<link rel="icon" href="data:,"><style>{style}</style><h1>Open {title} of {student}?</h1>'
    "<p>Continue if {student} is your student id. Otherwise, close this page.</p>"
    '<form method="post" action="/labctl-open?ticket={ticket}"><button>Continue</button></form>'
)
OPEN_S, IDLE_S = 10.0, 600.0
LIMITS = {"connect": OPEN_S, "read": IDLE_S, "write": IDLE_S, "pool": IDLE_S}


class RequireService:
    """Passes on what a signed-in student sends from this origin to their service.

    Starlette's SessionMiddleware must run before it. `scope["state"]["service"]` is the service.
    """

    def __init__(
        self, app: ASGIApp, access: StudentAccess, services: StudentServices, origin: str, page: str
    ) -> None:
        self.app = app
        self._access = access
        self._services = services
        self._origin = origin
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        if _is_foreign(scope, self._origin):
            await _refuse(scope, receive, send, "the request comes from another site")
            return
        if scope["type"] == "http" and scope["path"] == OPEN and scope["method"] in ("GET", "POST"):
            await self.app(scope, receive, send)
            return
        data = scope["session"]
        student = self._access.find_student(data)
        seat = self._access.find_seat(student) if student else ""
        name = TENSORBOARD if scope["path"].startswith(PATHS[TENSORBOARD]) else JUPYTER
        key = ServiceKey(seat=seat, lab_id=str(data.get("lab", "")), name=name)
        service = self._services.find(student, key) if student else None
        if service is None:
            await _refuse(scope, receive, send, f"this is not open; open it at {self._page}")
            return
        scope.setdefault("state", {}).update(service=service, name=name)

        def is_allowed() -> bool:
            return self._services.is_held(student, key)

        await self._access.run_while_valid(data, self.app, scope, receive, send, is_allowed)


class ServiceProxy(WebSite):
    """The application behind `RequireService`."""

    def __init__(
        self,
        access: StudentAccess,
        services: StudentServices,
        middleware: Sequence[Middleware],
    ) -> None:
        super().__init__(middleware)
        self.access = access
        self.services = services
        # socket -> connections to it
        self._pools: dict[str, httpcore2.AsyncConnectionPool] = {}
        methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
        add_routes(self.app, "GET", {OPEN: self.ask_open})
        add_routes(self.app, "POST", {OPEN: self.open})
        self.app.add_api_route("/{path:path}", self.send, methods=methods, response_class=Response)
        self.app.add_api_websocket_route("/{path:path}", self.relay)

    def close(self) -> None:
        self.services.close()

    def list_tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self.access.watch()]

    async def finish(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()

    async def ask_open(self, request: Request, ticket: str = "") -> Response:
        """Begin a session here with a ticket of the page for students.

        A browser without a session of this student gets a question first: somebody may have sent
        the address of their own notebook.
        """
        data = self.services.read_ticket(ticket)
        if data is None:
            return refuse("this address was already used or has expired; open it again")
        if request.session.get("student") == data["student"]:
            return await self.open(request, ticket)
        page = CONFIRM.format(
            title=TITLES[str(data["name"])],
            student=str(data["student"]),
            ticket=ticket,
            style=Markup(CONFIRM_STYLE),
        )
        return HTMLResponse(page, headers={**GUARDS, "content-security-policy": CONFIRM_POLICY})

    async def open(self, request: Request, ticket: str = "") -> Response:
        data = self.services.redeem_ticket(ticket)
        if data is None:
            return refuse("this address was already used or has expired; open it again")
        request.session.clear()
        request.session.update(data)
        name = request.session.pop("name")
        return RedirectResponse(PATHS[name], 303)

    async def send(self, request: Request) -> Response:
        """Pass on a request, and its answer as it arrives."""
        service: OpenService = request.state.service
        if request.headers.get("service-worker"):
            return refuse("a service worker would outlive the session")
        pool = self._pools.get(service.path)
        if pool is None:
            pool = self._pools[service.path] = make_pool(service.path)
        headers = _list_request_headers(service, request.headers)
        is_chunked = "transfer-encoding" in request.headers
        headers += [("transfer-encoding", "chunked")] if is_chunked else []
        has_body = is_chunked or "content-length" in request.headers
        try:
            message = httpcore2.Request(
                request.method,
                _build_url(service, request.scope),
                headers=[(name.encode(), value.encode("latin-1")) for name, value in headers],
                content=request.stream() if has_body else None,
                extensions={"timeout": LIMITS},
            )
            answer = await pool.handle_async_request(message)
        except FAILURES:
            return refuse("the service does not answer; open it again from your page", 502)
        response = StreamingResponse(_iterate(answer), answer.status)
        response.raw_headers = _list_response_headers(service, answer.headers)
        return response

    async def relay(self, browser: WebSocket) -> None:
        """Relay the messages of a WebSocket in both directions."""
        service: OpenService = browser.state.service
        protocols = [websockets.Subprotocol(one) for one in browser.scope["subprotocols"]]
        try:
            connection = await unix_connect(
                service.path,
                uri=f"ws://127.0.0.1:{service.port}{_build_target(browser.scope).decode('latin-1')}",
                origin=websockets.Origin(f"http://127.0.0.1:{service.port}"),
                additional_headers=_list_websocket_headers(service, browser.headers),
                subprotocols=protocols or None,
                user_agent_header=None,
                compression=None,
                open_timeout=OPEN_S,
                max_size=MOST_MESSAGE_BYTES,
            )
        except (OSError, TimeoutError, websockets.WebSocketException):
            await browser.close(1013)
            return
        async with connection:
            await browser.accept(connection.subprotocol)
            await _relay_both(browser, connection)


async def _relay_both(browser: WebSocket, connection: ClientConnection) -> None:
    async def send_up() -> None:
        while (message := await browser.receive())["type"] == "websocket.receive":
            text = message.get("text")
            await connection.send(text if text is not None else message["bytes"])

    async def send_down() -> None:
        async for message in connection:
            if isinstance(message, str):
                await browser.send_text(message)
            else:
                await browser.send_bytes(message)
        await browser.close(_browser_code(connection.close_code))

    tasks = [asyncio.create_task(send_up()), asyncio.create_task(send_down())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _browser_code(code: int | None) -> int:
    """Return a close code that may be sent: 1005 and 1006 mean that none was."""
    return code if code is not None and code not in (1005, 1006, 1015) else 1001


async def _iterate(answer: httpcore2.Response) -> AsyncIterator[bytes]:
    try:
        async for block in answer.aiter_stream():
            yield block
    except FAILURES:
        return  # the browser notices by the length
    finally:
        await answer.aclose()


def _build_url(service: OpenService, scope: Scope) -> httpcore2.URL:
    return httpcore2.URL(
        scheme="http", host="127.0.0.1", port=service.port, target=_build_target(scope)
    )


def _build_target(scope: Scope) -> bytes:
    """Return the path and the query at the service; TensorBoard does not know its path here."""
    path: bytes = scope["raw_path"]
    if scope["state"]["name"] == TENSORBOARD:
        path = b"/" + path.removeprefix(PATHS[TENSORBOARD].encode())
    if scope["query_string"]:
        path += b"?" + scope["query_string"]
    return path


def _list_request_headers(service: OpenService, headers: Headers) -> list[tuple[str, str]]:
    """Return the browser's headers without its secrets, as if it asked on the server itself."""
    chosen = [
        (name, value)
        for name, value in headers.items()
        if name not in NOT_SENT and not name.startswith(("x-forwarded-", "sec-websocket-"))
    ]
    cookies = _filter_cookies(headers.getlist("cookie"))
    own = f"127.0.0.1:{service.port}"
    chosen += [("host", own)] + ([("cookie", cookies)] if cookies else [])
    chosen += [("origin", f"http://{own}")] if "origin" in headers else []
    chosen += [("authorization", f"token {service.token}")] if service.token else []
    return chosen


def _list_websocket_headers(service: OpenService, headers: Headers) -> list[tuple[str, str]]:
    left_out = ("host", "origin", "user-agent")
    return [one for one in _list_request_headers(service, headers) if one[0] not in left_out]


def _filter_cookies(lines: Iterable[str]) -> str:
    cookies = [one.strip() for line in lines for one in line.split(";")]
    return "; ".join(one for one in cookies if one and not one.startswith(COOKIES))


def _list_response_headers(
    service: OpenService, headers: Iterable[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    """Return the service's headers without those that reach beyond it, and `GUARDS`."""
    origin = f"http://127.0.0.1:{service.port}".encode()
    chosen = []
    for name, value in headers:
        lower = name.lower().decode("latin-1")
        if lower == "set-cookie" and not value.strip().startswith(
            tuple(prefix.encode() for prefix in COOKIES)
        ):
            attributes = value.split(b";")
            kept = [one for one in attributes if not one.strip().lower().startswith(b"domain")]
            chosen.append((b"set-cookie", b";".join(kept)))
        elif lower == "location":
            chosen.append((b"location", value.removeprefix(origin)))
        elif lower not in NOT_RETURNED and not lower.startswith("access-control-"):
            chosen.append((lower.encode(), value))
    return chosen + [(name.encode(), value.encode()) for name, value in GUARDS.items()]


def _is_foreign(scope: Scope, origin: str) -> bool:
    """Tell whether a request comes from another origin, except for a link that a person follows."""
    headers = Headers(scope=scope)
    if len(headers.getlist("host")) != 1:
        return True
    if scope["type"] == "websocket":
        return headers.get("origin") != origin
    if headers.get("origin") not in (None, origin):
        return True
    is_followed = (
        scope["method"] == "GET"
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
    if headers.get("sec-fetch-site", "none") in ("same-origin", "none") or is_followed:
        return scope["method"] not in ("GET", "HEAD") and not headers.get("origin")
    return True


async def _refuse(scope: Scope, receive: Receive, send: Send, why: str) -> None:
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).close(1008)
        return
    await refuse(why)(scope, receive, send)

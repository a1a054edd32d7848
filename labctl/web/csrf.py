"""Protection against requests from other pages: Origin, Fetch Metadata, and a token in each form.

Common middlewares only compare a form's token with a cookie, and Starlette has none. Both checks
are plain ASGI and run before the routes, so that they do not delay a stream of events.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from labctl.web.auth import Session, is_followed_link
from labctl.web.responses import refuse

SAFE_METHODS = ("GET", "HEAD")
# allowed values of Sec-Fetch-Site: a page of this dashboard, or an address typed by a person
OWN_SITES = ("same-origin", "none")
# until a whole form must have arrived
FORM_S = 60.0
FORM_TYPE = "application/x-www-form-urlencoded"


class SameOrigin:
    """Refuses requests from pages of another origin, even on another port of this machine.

    `scheme` is what browsers use, also if a proxy ends TLS. `is_entrance` tells which requests a
    link on another page may lead to.
    """

    def __init__(
        self,
        app: ASGIApp,
        scheme: str = "http",
        is_entrance: Callable[[Scope], bool] = is_followed_link,
    ) -> None:
        self.app = app
        self._scheme = scheme
        self._is_entrance = is_entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and not self._is_own_socket(scope):
            await WebSocket(scope, receive, send).close(1008)
            return
        refusal = self._check_origin(scope) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, send)

    def _is_own_socket(self, scope: Scope) -> bool:
        """Tell whether a page of this origin opens a WebSocket: browsers always send its origin."""
        headers = Headers(scope=scope)
        if len(headers.getlist("host")) != 1:
            return False
        return headers.get("origin") == f"{self._scheme}://{headers['host']}"

    def _check_origin(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if len(headers.getlist("host")) != 1:
            return refuse("the request must have exactly one Host header", 400)
        if (site or "none") not in OWN_SITES and not self._is_entrance(scope):
            return refuse("the request comes from another site")
        if origin is not None and origin != f"{self._scheme}://{headers['host']}":
            return refuse("the request comes from another site")
        if scope["method"] in SAFE_METHODS:
            return None
        if scope["method"] != "POST":
            return refuse("this method is not allowed", 405)
        if origin is None and site != "same-origin":
            return refuse("the request does not come from this dashboard")
        if headers.get("content-type", "").partition(";")[0] != FORM_TYPE:
            return refuse("only forms of this dashboard are accepted", 415)
        return None


class FormToken:
    """Passes on forms that have their session's token, as `scope["state"]["form"]`.

    RequireSession and Starlette's limit for request bodies must run before it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self.app(scope, receive, send)
            return
        session: Session = scope["state"]["session"]
        try:
            async with asyncio.timeout(FORM_S), Request(scope, receive).form() as fields:
                form = {name: value for name, value in fields.items() if isinstance(value, str)}
        except TimeoutError:
            answer = refuse("the form did not arrive in time; send it again", 408)
            await answer(scope, receive, send)
            return
        if not hmac.compare_digest(form.get("csrf", "").encode(), session.csrf.encode()):
            answer = refuse("this form belongs to another session; go back, then reload the page")
            await answer(scope, receive, send)
            return
        scope["state"]["form"] = form
        await self.app(scope, receive, send)

"""No other page than ours may ask: by Origin and Fetch Metadata, and a form's own token.

Middlewares for this compare a form's token with a cookie and look at neither header; Starlette has
none. Both checks stand before a route, in plain ASGI: a stream of events is not held up.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from labctl.web.auth import Session, is_followed_link
from labctl.web.responses import refuse

SAFE_METHODS = ("GET", "HEAD")
# What a browser says of where a request comes from: our own page, or the person.
OWN_SITES = ("same-origin", "none")
FORM_TYPE = "application/x-www-form-urlencoded"


class SameOrigin:
    """Refuses what a page of another origin asks for, be it at another port of this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _check_origin(scope) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, send)


class FormToken:
    """Passes a form on that bears its session's token, as `scope["state"]["form"]`.

    It stands behind RequireSession and Starlette's limit for bodies.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self.app(scope, receive, send)
            return
        session: Session = scope["state"]["session"]
        async with Request(scope, receive).form() as fields:
            form = {name: value for name, value in fields.items() if isinstance(value, str)}
        if not hmac.compare_digest(form.get("csrf", "").encode(), session.csrf.encode()):
            answer = refuse("this form is not of your session: load the page anew")
            await answer(scope, receive, send)
            return
        scope["state"]["form"] = form
        await self.app(scope, receive, send)


def _check_origin(scope: Scope) -> Response | None:
    headers = Headers(scope=scope)
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if len(headers.getlist("host")) != 1:
        return refuse("a request names one host", 400)
    if (site or "none") not in OWN_SITES and not is_followed_link(scope):
        return refuse("another page asked for this")
    if origin is not None and origin != f"http://{headers['host']}":
        return refuse("another page asked for this")
    if scope["method"] in SAFE_METHODS:
        return None
    if scope["method"] != "POST":
        return refuse("this is not done here", 405)
    if origin is None and site != "same-origin":
        return refuse("no page of this dashboard asked for this")
    if headers.get("content-type", "").partition(";")[0] != FORM_TYPE:
        return refuse("only this dashboard's own forms are taken", 415)
    return None

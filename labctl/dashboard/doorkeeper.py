"""Who may see the dashboard: the one who has its URL, in the browser where it was opened.

The URL's token works once. It becomes a cookie of that browser, and the next URL is made at once,
for another one. A request must name this machine as its host, come from no other page than ours
and, where it changes something, bear its session's own word. All of it is looked at before a
route is, in plain ASGI: a stream of events is not held up.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OUR_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""By any port: `ssh -L 9000:127.0.0.1:8000` is a way here too."""
SESSION_S = 12 * 3600
MOST_SESSIONS = 64
MOST_FORM_BYTES = 16 * 1024
SAFE = ("GET", "HEAD")
OWN_SITES = ("same-origin", "none")
"""What a browser says of where a request comes from: our own page, or the person."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""No script but our own file, nothing from elsewhere, in nobody's frame."""
ALWAYS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With none at all a browser would say of its own forms that they come from nowhere.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
ENTER = (
    '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<meta http-equiv="refresh" content="0;url=/"><link rel="icon" href="data:,">'
    '<title>labctl</title><p>This browser is let in. <a href="/">To the course</a></p>'
)


@dataclass
class Session:
    """One browser. `csrf` stands in every form that it is shown; `said` is shown once."""

    began: float
    csrf: str
    hidden: bool = False
    said: list[tuple[str, str]] = field(default_factory=list)


class Sessions:
    """The browsers that were let in, and the token that lets the next one in.

    `file` (0600) always holds the URL with that token, for whoever may read the course's folder.
    """

    def __init__(self, file: Path, now: Callable[[], float] = time.time) -> None:
        self.file = file
        self._now = now
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._token = ""
        self._base = ""

    def open(self, base: str) -> str:
        """Make the first URL, below `base`, such as http://127.0.0.1:8000; it is returned."""
        with self._lock:
            self._base = base
            return self._renew()

    def close(self) -> None:
        """Nobody is let in any more; the file goes."""
        with self._lock:
            self._token = ""
            self._sessions.clear()
            self.file.unlink(missing_ok=True)

    def _renew(self) -> str:
        self._token = secrets.token_urlsafe(32)
        url = f"{self._base}/?token={self._token}"
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.file.with_name(self.file.name + ".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, 0o600), "w") as out:
            os.fchmod(out.fileno(), 0o600)
            out.write(url + "\n")
        draft.replace(self.file)
        return url

    def url(self) -> str:
        """What lets one more browser in."""
        with self._lock:
            return f"{self._base}/?token={self._token}"

    def spend(self, token: str) -> str:
        """The cookie's value for the browser that has the token; "" for any other token."""
        with self._lock:
            if not (token and self._token) or not hmac.compare_digest(
                token.encode(), self._token.encode()
            ):
                return ""
            self._renew()
            value = secrets.token_urlsafe(32)
            while len(self._sessions) >= MOST_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            session = Session(began=self._now(), csrf=secrets.token_urlsafe(24))
            self._sessions[_hash(value)] = session
            return value

    def of(self, value: str) -> Session | None:
        """The session that a cookie's value stands for, as long as it lasts."""
        with self._lock:
            found = self._sessions.get(_hash(value))
            if found is not None and self._now() - found.began > SESSION_S:
                del self._sessions[_hash(value)]
                return None
            return found


def _hash(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


class Doorkeeper:
    """Stands before `app`; `scope["state"]["session"]` is there for every request that passes.

    `cookie` is this course's own name for it: cookies know hosts, not ports.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, cookie: str) -> None:
        self.app = app
        self.sessions = sessions
        self.cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _with_policy(message.get("headers", []))
            await send(message)

        if scope["type"] != "http":
            await _refused("there is nothing of this kind here")(scope, receive, guarded)
            return
        answer = self._refusal(scope, Headers(scope=scope))
        if answer is not None:
            await answer(scope, receive, guarded)
        elif scope["method"] in SAFE:
            await self.app(scope, receive, guarded)
        else:
            await self._posted(scope, receive, guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """What is said instead of an answer; None where the request may pass."""
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or _name(host) not in OUR_HOSTS:
            return _refused("this dashboard answers to 127.0.0.1 and localhost only", 421)
        if headers.get("sec-fetch-site", "none") not in OWN_SITES and not _enters(scope, headers):
            return _refused("another page asked for this")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return _refused("this is not done here", 405)
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return _refused("another page asked for this")
        if scope["method"] == "GET" and scope["path"] == "/" and b"token=" in scope["query_string"]:
            return self._enter(scope)
        session = self.sessions.of(_cookies(headers).get(self.cookie, ""))
        if session is None:
            return _refused(
                "this browser is not let in, or no more; "
                f"the URL that lets one in stands in {self.sessions.file}"
            )
        scope.setdefault("state", {})["session"] = session
        return None

    def _enter(self, scope: Scope) -> Response:
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        value = self.sessions.spend(token)
        if not value:
            return _refused(
                "this URL has let a browser in before, or is an old one; "
                f"the next one stands in {self.sessions.file}"
            )
        # A page and no redirect: after one that another site began, a browser would keep a strict
        # cookie to itself.
        page = HTMLResponse(ENTER)
        page.set_cookie(
            self.cookie, value, max_age=SESSION_S, path="/", httponly=True, samesite="strict"
        )
        return page

    async def _posted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a form on that bears its session's word; `scope["state"]["form"]` holds it."""
        headers = Headers(scope=scope)
        session: Session = scope["state"]["session"]
        if headers.get("origin") is None and headers.get("sec-fetch-site") != "same-origin":
            await _refused("no page of this dashboard asked for this")(scope, receive, send)
            return
        if headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
            await _refused("only this dashboard's own forms are taken", 415)(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            await _refused("that is too much for a form", 413)(scope, receive, send)
            return
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        form = {name: values[0] for name, values in fields.items()}
        if not hmac.compare_digest(form.get("csrf", "").encode(), session.csrf.encode()):
            await _refused("this form is not of your session: load the page anew")(
                scope, receive, send
            )
            return
        scope["state"]["form"] = form
        await self.app(scope, receive, send)


async def _body(receive: Receive) -> bytes | None:
    """All that was sent; None where it is more than a form is."""
    found = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        found += part
        if len(found) > MOST_FORM_BYTES:
            return None
        if not message.get("more_body"):
            return found


def _enters(scope: Scope, headers: Headers) -> bool:
    """Whether a person followed the URL from somewhere: a chat, a mail in the browser."""
    return (
        scope["method"] == "GET"
        and scope["path"] == "/"
        and b"token=" in scope["query_string"]
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def _name(host: str) -> str:
    """The host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and name else host


def _cookies(headers: Headers) -> dict[str, str]:
    pairs = (one.partition("=") for line in headers.getlist("cookie") for one in line.split(";"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _with_policy(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The answer's headers and ours; what an answer says of itself (a sandbox) counts."""
    there = {name.lower() for name, _ in headers}
    more = [(n.encode(), v.encode()) for n, v in ALWAYS.items() if n.encode() not in there]
    return [*headers, *more]


def _refused(why: str, status: int = 403) -> Response:
    """Plain text of our own words: nothing that was sent stands in it."""
    return Response(f"labctl: {why}\n", status, media_type="text/plain; charset=utf-8")

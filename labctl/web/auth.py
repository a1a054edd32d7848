"""Who may see the dashboard: whoever has its URL, in the browser where it was opened.

The URL's token works once and signs a browser in; the next URL is made at once, for another one.
Starlette's signed cookie holds the session, so that it outlives a restart of the keeper.
"""

from __future__ import annotations

import hmac
import secrets
import stat
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs

from itsdangerous import Signer
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from labctl.config.identity import write_private
from labctl.model import Value
from labctl.web.responses import refuse

SESSION_S = 12 * 3600
KEY_LENGTH = 43  # of 32 random bytes as token_urlsafe writes them
SIGNED_IN = (
    '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<meta http-equiv="refresh" content="0;url=/"><link rel="icon" href="data:,">'
    '<title>labctl</title><p>This browser is signed in. <a href="/">To the course</a></p>'
)


class Session(Value, frozen=True):
    """One browser that is signed in. `csrf` stands in every form that it is shown.

    A cookie is sent to every port of its host, so `csrf` is computed from `id` and never in it.
    """

    id: str
    csrf: str
    hidden: bool = False


def read_or_create_key(file: Path) -> str:
    """The key that signs a course's sessions; a file that others could read is replaced."""
    try:
        key = file.read_text().strip()
        is_private = not stat.S_IMODE(file.stat().st_mode) & 0o077
    except (FileNotFoundError, UnicodeDecodeError):
        key, is_private = "", False
    if len(key) < KEY_LENGTH or not is_private:
        key = secrets.token_urlsafe(32)
        write_private(file, f"{key}\n".encode())
    return key


class LoginLink:
    """The URL that signs the next browser in.

    `file` (0600) always holds it, for whoever may read the course's folder.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._token = ""
        self._base = ""

    def open(self, base: str) -> str:
        """Make the first URL, below `base`, such as http://127.0.0.1:8000; it is returned."""
        with self._lock:
            self._base = base
            return self._renew()

    def close(self) -> None:
        """Sign nobody in any more; the file goes."""
        with self._lock:
            self._token = ""
            self.file.unlink(missing_ok=True)

    @property
    def url(self) -> str:
        with self._lock:
            return self._format_url()

    def spend(self, token: str) -> bool:
        """Whether this is the token; it then works no more."""
        with self._lock:
            if not self._token or not hmac.compare_digest(token.encode(), self._token.encode()):
                return False
            self._renew()
            return True

    def _renew(self) -> str:
        self._token = secrets.token_urlsafe(32)
        url = self._format_url()
        write_private(self.file, f"{url}\n".encode())
        return url

    def _format_url(self) -> str:
        return f"{self._base}/?token={self._token}"


class RequireSession:
    """Lets through who is signed in, with `scope["state"]["session"]`; signs in who has the URL.

    Starlette's SessionMiddleware has to stand before it.
    """

    def __init__(self, app: ASGIApp, link: LoginLink, key: str) -> None:
        self.app = app
        self._link = link
        self._signer = Signer(key, salt="labctl.web.form")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if is_sign_in(scope):
            await self._sign_in(scope)(scope, receive, send)
            return
        data = scope["session"]
        if not time.time() - data.get("signed_in_at", 0) < SESSION_S:
            answer = refuse(
                "this browser is not signed in, or no more; "
                f"the URL that signs it in is in {self._link.file}"
            )
            await answer(scope, receive, send)
            return
        scope.setdefault("state", {})["session"] = Session(
            id=data["id"],
            csrf=self._signer.get_signature(data["id"]).decode(),
            hidden=data.get("hidden", False),
        )
        await self.app(scope, receive, send)

    def _sign_in(self, scope: Scope) -> Response:
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not self._link.spend(token):
            return refuse(
                "this URL has signed a browser in before, or is an old one; "
                f"the next one is in {self._link.file}"
            )
        scope["session"].clear()
        scope["session"].update(id=secrets.token_urlsafe(16), signed_in_at=int(time.time()))
        # A page and no redirect: after one that another site began, a browser would keep a strict
        # cookie to itself.
        return HTMLResponse(SIGNED_IN)


def is_sign_in(scope: Scope) -> bool:
    """Whether a request is for the URL that signs a browser in."""
    return scope["method"] == "GET" and scope["path"] == "/" and b"token=" in scope["query_string"]


def is_followed_link(scope: Scope) -> bool:
    """Whether a person followed that URL from somewhere: a chat, a mail in the browser."""
    headers = Headers(scope=scope)
    return (
        is_sign_in(scope)
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )

"""Authentication of the dashboard: a URL with a token signs in the browser that opens it.

Each token works once; the next URL is created immediately, for another browser. The session is in
Starlette's signed cookie, so that it outlives a restart of the keeper.
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
KEY_LENGTH = 43  # characters of 32 random bytes in token_urlsafe's encoding
SIGNED_IN = (
    '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<meta http-equiv="refresh" content="0;url=/"><link rel="icon" href="data:,">'
    '<title>labctl</title><p>This browser is signed in. <a href="/">To the course</a></p>'
)


class Session(Value, frozen=True):
    """A browser that is signed in. `csrf` is the token in each of its forms.

    Cookies are sent to every port of their host, so `csrf` is computed from `id` and is not in the
    cookie. `person` is the name that its user entered, for the ledger.
    """

    id: str
    csrf: str
    hidden: bool = False
    person: str = ""


def read_or_create_key(file: Path) -> str:
    """Return the key that signs a course's sessions; replace a file that others could read."""
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
    """The URL that signs in the next browser.

    `file` (0600) always has the current one, for people who may read the course's folder.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._token = ""
        self._base = ""

    def open(self, base: str) -> str:
        """Create and return the first URL below `base`, such as http://127.0.0.1:8000."""
        with self._lock:
            self._base = base
            return self._renew()

    def close(self) -> None:
        """Accept no more tokens, and delete the file."""
        with self._lock:
            self._token = ""
            self.file.unlink(missing_ok=True)

    @property
    def url(self) -> str:
        with self._lock:
            return self._format_url()

    def redeem(self, token: str) -> bool:
        """Check a token. A correct one returns True and becomes invalid."""
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
    """Passes on requests of signed-in browsers, with `scope["state"]["session"]`.

    It also signs browsers in. Starlette's SessionMiddleware must run before it.
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
                "this browser is not signed in, or its session has expired; "
                f"open the URL from the file {self._link.file}"
            )
            await answer(scope, receive, send)
            return
        scope.setdefault("state", {})["session"] = Session(
            id=data["id"],
            csrf=self._signer.get_signature(data["id"]).decode(),
            hidden=data.get("hidden", False),
            person=data.get("person", ""),
        )
        await self.app(scope, receive, send)

    def _sign_in(self, scope: Scope) -> Response:
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not self._link.redeem(token):
            return refuse(
                "this URL was already used or has expired; "
                f"the current URL is in the file {self._link.file}"
            )
        scope["session"].clear()
        scope["session"].update(id=secrets.token_urlsafe(16), signed_in_at=int(time.time()))
        # A page instead of a redirect: when another site started the navigation, a browser would
        # not send a strict cookie after a redirect.
        return HTMLResponse(SIGNED_IN)


def is_sign_in(scope: Scope) -> bool:
    """Tell whether a request is for the URL that signs in a browser."""
    return scope["method"] == "GET" and scope["path"] == "/" and b"token=" in scope["query_string"]


def is_followed_link(scope: Scope) -> bool:
    """Tell whether a person followed that URL from another page, such as a chat or web mail."""
    headers = Headers(scope=scope)
    return (
        is_sign_in(scope)
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )

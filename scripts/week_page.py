"""A student's browser: it opens the page for students, and sends the forms that it finds there."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

TIMEOUT_S = 60.0
WORD = 'name="csrf" value="'


class StudentBrowser:
    """One student's session on the page. `url` has no path."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        cookies = urllib.request.HTTPCookieProcessor(CookieJar())
        self._opener = urllib.request.build_opener(cookies)

    def open(self, path: str = "/") -> str:
        """Return the page at `path`."""
        with self._opener.open(f"{self.url}{path}", timeout=TIMEOUT_S) as reply:
            text: str = reply.read().decode()
        return text

    def sign_in(self, join_file: Path) -> None:
        """Sign in with the values that the page reads from a join file."""
        values = json.loads(join_file.read_text())["join"]
        self._send("/sign-in", {"csrf": "", "student": values["student"], "code": values["code"]})

    def find_value(self, text: str, before: str) -> str:
        """Return what follows `before` in a page, up to the next quote; "" if it is not there."""
        return text.partition(before)[2].partition('"')[0]

    def send(self, path: str, page: str = "", **fields: str) -> str:
        """Open an action's page, by default that at `path`, and send its form.

        Returns the page that follows.
        """
        word = self.find_value(self.open(page or path), WORD)
        return self._send(path.partition("?")[0], {"csrf": word, **fields})

    def _send(self, path: str, fields: dict[str, str]) -> str:
        body = urllib.parse.urlencode(fields).encode()
        request = urllib.request.Request(f"{self.url}{path}", body, {"Origin": self.url})
        with self._opener.open(request, timeout=TIMEOUT_S) as reply:
            text: str = reply.read().decode()
        return text

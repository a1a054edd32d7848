"""A student's browser: it opens pages, sends their forms, and types in a terminal."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

from websockets import Origin
from websockets.sync.client import connect

TIMEOUT_S = 60.0
# The shell joins the two parts, so that the typed line is not taken for its output.
TYPED_END, PRINTED_END = "echo typed-''all", b"typed-all"
WORD = 'name="csrf" value="'


class StudentBrowser:
    """One student's session on the page. `url` has no path."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._cookies = CookieJar()
        processor = urllib.request.HTTPCookieProcessor(self._cookies)
        self._opener = urllib.request.build_opener(processor)

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

    def type_in_terminal(self, lab_id: str, text: str) -> None:
        """Type `text` in the page's terminal of a lab, and wait until the shell has read it."""
        address = f"ws{self.url.removeprefix('http')}/terminal/{lab_id}/socket"
        cookie = "; ".join(f"{one.name}={one.value}" for one in self._cookies)
        with connect(
            address, origin=Origin(self.url), additional_headers={"Cookie": cookie}
        ) as socket:
            socket.send(json.dumps({"typed": f"{text}\n{TYPED_END}\n"}))
            printed = b""
            while PRINTED_END not in printed:
                block = socket.recv(TIMEOUT_S, decode=False)
                printed += block
                socket.send(json.dumps({"drawn": len(block)}))

    def _send(self, path: str, fields: dict[str, str]) -> str:
        body = urllib.parse.urlencode(fields).encode()
        request = urllib.request.Request(f"{self.url}{path}", body, {"Origin": self.url})
        with self._opener.open(request, timeout=TIMEOUT_S) as reply:
            text: str = reply.read().decode()
        return text

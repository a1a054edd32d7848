"""Shows the profiles of a lab's runs: a small web server for a container beside them.

`/RUN/` is a profile's page; of each run's logs/profile only the files of FILES are handed out, and
only to those who call it localhost, so that no page of somebody else's reaches it by another name.
Standard library and Python 3.8 only.
"""

from __future__ import annotations

import html
import os
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RUNS = Path("/lab/runs")
PLACE = re.compile(r"/([a-z0-9][a-z0-9-]{0,38})/([a-z.]*)")
FILES = {
    "index.html": "text/html; charset=utf-8",
    "profile.json": "application/json",
    "trace.json.gz": "application/gzip",
}
CALLED = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")


class Shelf(BaseHTTPRequestHandler):
    """One request."""

    runs = RUNS

    def do_GET(self) -> None:
        if not CALLED.fullmatch(self.headers.get("Host", "")):
            self.send_error(403, "call it localhost")
            return
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer("text/html; charset=utf-8", self._list().encode())
            return
        found = PLACE.fullmatch(path)
        name = (found[2] or "index.html") if found else ""
        if found is None or name not in FILES:
            self.send_error(404)
            return
        place = self.runs / found[1] / "logs" / "profile" / name
        try:
            # The run may have put a link there; none is followed.
            if place.resolve() != self.runs.resolve() / place.relative_to(self.runs):
                raise OSError("a link")
            content = place.read_bytes()
        except OSError:
            self.send_error(404)
            return
        self._answer(FILES[name], content)

    def _list(self) -> str:
        found = sorted(self.runs.glob("*/logs/profile/index.html"), reverse=True)
        names = [html.escape(path.parents[2].name) for path in found]
        rows = "".join(f'<li><a href="/{name}/">{name}</a></li>' for name in names)
        return f"<!doctype html><meta charset=utf-8><title>Profiles</title><ul>{rows}</ul>"

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    port = int(os.environ.get("LABCTL_SERVICE_PORT") or sys.argv[1])
    ThreadingHTTPServer(("0.0.0.0", port), Shelf).serve_forever()


if __name__ == "__main__":
    main()

"""Web server for the profiles of a lab's runs, in a container on the server.

`/RUN/` is a profile's page. Of each run's logs/profile, only the files of FILES are served, and
only to requests for the host localhost, so that a foreign page cannot read them by DNS rebinding.
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
PATH = re.compile(r"/([a-z0-9][a-z0-9-]{0,38})/([a-z.]*)")
FILES = {
    "index.html": "text/html; charset=utf-8",
    "profile.json": "application/json",
    "trace.json.gz": "application/gzip",
}
LOCALHOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")


class ProfileRequestHandler(BaseHTTPRequestHandler):
    """One request."""

    runs = RUNS

    def do_GET(self) -> None:
        if not LOCALHOST.fullmatch(self.headers.get("Host", "")):
            self.send_error(403, "use the host name localhost")
            return
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer("text/html; charset=utf-8", self._list().encode())
            return
        match = PATH.fullmatch(path)
        name = (match[2] or "index.html") if match else ""
        if match is None or name not in FILES:
            self.send_error(404)
            return
        file = self.runs / match[1] / "logs" / "profile" / name
        try:
            # The run may have created a link there; links are not followed.
            if file.resolve() != self.runs.resolve() / file.relative_to(self.runs):
                raise OSError("a link")
            content = file.read_bytes()
        except OSError:
            self.send_error(404)
            return
        self._answer(FILES[name], content)

    def _list(self) -> str:
        pages = sorted(self.runs.glob("*/logs/profile/index.html"), reverse=True)
        names = [html.escape(path.parents[2].name) for path in pages]
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
    ThreadingHTTPServer(("0.0.0.0", port), ProfileRequestHandler).serve_forever()


if __name__ == "__main__":
    main()

"""A Docker Engine's interface on a Unix socket, as far as a start asks it; nothing is ever run.

The real engine answers in tests/e2e; here are the answers that it seldom gives.
"""

from __future__ import annotations

import json
import shutil
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

# HTTP status and body; bytes are sent as they are, status 0 hangs up instead.
Answer = tuple[int, Any]


@dataclass
class EngineSocket:
    """`answers` may look at (method, path, body) first; what it leaves alone does not exist."""

    path: Path
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    answers: Callable[[str, str, Any], Answer | None] = lambda method, path, body: None
    version: str = "1.41"

    @property
    def host(self) -> str:
        return f"unix://{self.path}"

    def answer(self, method: str, path: str, body: Any) -> Answer:
        if path == "/_ping":
            return 200, b"OK"
        self.asked.append((method, path, body))
        return self.answers(method, path, body) or (404, {"message": f"No such thing: {path}"})


@contextmanager
def engine_socket() -> Iterator[EngineSocket]:
    # A socket's path may have only about 100 bytes: pytest's own directories are too long.
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir="/tmp"))
    engine = EngineSocket(folder / "s")
    with _Server(str(engine.path), type("Bound", (_Call,), {"engine": engine})) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()
            shutil.rmtree(folder)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class _Call(BaseHTTPRequestHandler):
    engine: EngineSocket

    def do_GET(self) -> None:  # the base class calls it by this name
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        status, content = self.engine.answer(self.command, self.path, body)
        if not status:
            return
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Api-Version", self.engine.version)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return ""

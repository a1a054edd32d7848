"""A course whose students' services are one small program, which shows what reaches it."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from course_keeper_context import Pretended, create

from labctl.courses import join_codes
from labctl.courses.requests import RequestHandler
from labctl.model import Endpoint, Service
from labctl.services.socket_forward import SocketForwardSpec
from labctl.web import factory, http_server
from labctl.web.student_services import ServiceKey

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import Bed, Visitor, make, wait_until

CODE = "abcdefgh" * 4
LAB_ID = "5d1f0c2e9a7b"
TOKEN = "token-of-jupyter"
BIG = 8 * 1024**2
# What a service of a student may try.
ANSWER = [
    (b"content-type", b"application/json"),
    (b"set-cookie", b"mine=1; Domain=example.edu; Path=/"),
    (b"set-cookie", b"labctl-student-x=forged; Path=/"),
    (b"set-cookie", b"__Host-labctl-student-x=forged; Path=/; Secure"),
    (b"service-worker-allowed", b"/"),
    (b"clear-site-data", b'"cookies"'),
    (b"access-control-allow-origin", b"*"),
    (b"strict-transport-security", b"max-age=1"),
    (b"x-own", b"kept"),
]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the request itself, `/big` with many bytes, `/hostile` with ANSWER.

    Messages of a WebSocket come back.
    """
    if scope["type"] == "websocket":
        await receive()
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
        await send(
            {"type": "websocket.accept", "subprotocol": (scope["subprotocols"] or [None])[0]}
        )
        await send({"type": "websocket.send", "text": json.dumps([scope["path"], headers])})
        while (message := await receive())["type"] == "websocket.receive":
            sent = {key: message[key] for key in ("text", "bytes") if message.get(key) is not None}
            await send({"type": "websocket.send", **sent})
        return
    if scope["type"] != "http":
        return
    body = b""
    while (part := await receive())["type"] == "http.request":
        body += part.get("body", b"")
        if not part.get("more_body"):
            break
    if scope["path"] == "/big":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(BIG // 65_536):
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
        await send({"type": "http.response.body"})
        return
    headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
    request = {
        "path": scope["raw_path"].decode(), "query": scope["query_string"].decode(),
        "headers": headers, "body": body.decode(), "method": scope["method"],
    }  # fmt: skip
    chosen = ANSWER if scope["path"] == "/hostile" else ANSWER[:1]
    await send({"type": "http.response.start", "status": 200, "headers": chosen})
    await send({"type": "http.response.body", "body": json.dumps(request).encode()})


@dataclass
class OpenForward:
    """A SocketForward without ssh: the service listens on its socket itself."""

    spec: SocketForwardSpec
    is_alive: bool = True
    answers: bool = True
    # what happened to it
    calls: list[str] = field(default_factory=list)

    def is_answering(self) -> bool:
        return self.answers

    def close(self) -> None:
        self.is_alive = False
        self.calls.append("close")

    def open(self) -> OpenForward:
        self.is_alive = True
        self.calls.append("open")
        return self


class ServiceVisitor(Visitor):
    """A browser at the services' origin, which keeps its session whatever a service sets."""

    def confirm(self, ticket: str) -> int:
        """Answer the question whether to open this; the status."""
        return self.ask(ticket, "POST", Origin=f"http://{self.host}")[0]

    def ask(
        self, path: str, method: str = "GET", body: str = "", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        before = self.cookie
        result = super().ask(path, method, body, **headers)
        if before and self.cookie.partition("=")[0] != before.partition("=")[0]:
            self.cookie = before
        return result


@dataclass
class Campus:
    """A course in which lovelace holds the lab `lab_id`, and turing a lab of another id."""

    bed: Bed
    url: str
    request_handler: RequestHandler
    lab_id: str = LAB_ID

    def invite(self, student: str, code: str = CODE) -> None:
        folder = self.bed.folder
        public = join_codes.derive_key_pair(folder.id, student, code)[1]
        join_codes.store_page_code(folder, student, public, int(time.time() + 1000))

    def enter(self, student: str) -> Visitor:
        self.invite(student)
        visitor = Visitor(f"{self.url}/")
        status, _, _ = visitor.form("/sign-in", csrf="", student=student, code=CODE)
        assert status == 303
        return visitor

    def find_ticket(self, page: Visitor, name: str = "jupyter") -> tuple[str, str]:
        """The services' origin, and the address there that begins a session."""
        path = f"/services/{self.lab_id}/{name}"
        wait_until(lambda: "location" in page.ask(path)[1])
        origin, found, ticket = page.ask(path)[1]["location"].partition("/labctl-open")
        return origin, found + ticket

    def open(self, student: str, name: str = "jupyter") -> ServiceVisitor:
        origin, ticket = self.find_ticket(self.enter(student), name)
        visitor = ServiceVisitor(f"{origin}/")
        assert visitor.confirm(ticket) == 303
        return visitor


@contextmanager
def run_service() -> Iterator[OpenForward]:
    """Run the program at a socket of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        path = f"{short}/service"
        program = uvicorn.Server(uvicorn.Config(answer, uds=path, log_level="critical"))
        thread = threading.Thread(target=program.run, daemon=True)
        thread.start()
        wait_until(lambda: program.started)
        service = Service(name="jupyter", port=8888, token=TOKEN)
        endpoint = Endpoint(host="192.0.2.7")
        yield OpenForward(
            SocketForwardSpec(
                config="", server_id="", endpoint=endpoint, service=service, path=path
            )
        )
        program.should_exit = True
        thread.join(30)


@contextmanager
def serve_bed(
    bed: Bed,
    open_service: Callable[[ServiceKey], Any] | None = None,
    settings: http_server.StudentSettings | None = None,
    lab_id: str = LAB_ID,
) -> Iterator[Campus]:
    """Serve a course to its students, who hold nothing."""
    request_handler = RequestHandler(bed.folder, Pretended(bed.folder))
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        if open_service is not None:
            patch.setattr(factory, "open_seat_service", lambda course, key: open_service(key))
        url = http_server.serve_student_page(
            bed.folder,
            bed.paths,
            bed.state,
            settings or http_server.StudentSettings(port=0, services_port=0),
            request_handler=request_handler,
            stop=stop,
        )
    try:
        yield Campus(bed, url, request_handler, lab_id)
    finally:
        stop.set()
        bed.state.close()


@contextmanager
def serve_campus(
    root: Path,
    open_service: Callable[[ServiceKey], Any],
    settings: http_server.StudentSettings | None = None,
    lab_id: str = LAB_ID,
) -> Iterator[Campus]:
    """Serve a campus; `open_service` opens what `SocketForward` does."""
    with serve_bed(make(root), open_service, settings, lab_id) as campus:
        campus.bed.serve_up(0)
        create(campus.request_handler, "lovelace", lab="mine", lab_id=lab_id)
        create(campus.request_handler, "turing", "bb" * 8, lab="mine", lab_id="a" * 12)
        assert campus.request_handler.wait(60)
        yield campus

"""A terminal of the student's server in the browser, over a WebSocket of the page for students.

It is at the origin of that page and not at that of services, so that a notebook's scripts cannot
type into it. What it shows was written by programs: it is only ever drawn by xterm.js.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import Response
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect

from labctl.decoding import decode_json
from labctl.errors import LabError, NotFoundError
from labctl.errors.unexpected import as_lab_error
from labctl.model import Value
from labctl.services.remote_terminal import RemoteTerminal, open_server_terminal
from labctl.web.course_site import describe_failure
from labctl.web.mutations import CourseActions
from labctl.web.responses import POLICY
from labctl.web.student_parts import is_usable
from labctl.web.web_site import add_routes

if TYPE_CHECKING:
    from labctl.web.student_page import StudentPage

# terminals that are open at once: of one student, and of all
MOST_OWN, MOST_IN_ALL = 4, 100
# bytes that the browser may have received and not drawn yet
MOST_UNSEEN_BYTES = 512 * 1024
# bytes that are typed at once
WRITE_BYTES = 65_536
# bytes that may wait for a program that does not read what is typed, as after a long paste
MOST_UNREAD_BYTES = 8 * 1024**2
# how soon a terminal ends once its student has no right to the server any more
CHECK_EVERY_S = 3.0
# xterm.js writes the colors of the terminal into a style element.
TERMINAL_POLICY = POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
PASTED = "Too much text was pasted at once. Upload a file in Jupyter instead."
BUSY, REFUSED = 1013, 1008
PATH = "/terminal/{lab_id}"


class TerminalKey(Value, frozen=True):
    """A terminal of a student, in one of their labs on a seat's server."""

    student: str
    seat: str
    lab_id: str

    @property
    def session(self) -> str:
        """The name of its tmux session: members of a team have different ones."""
        digest = hashlib.sha256(f"{self.student} {self.lab_id}".encode()).hexdigest()
        return f"labctl-web-{digest[:8]}"


class TerminalOpener(Protocol):
    def __call__(self, key: TerminalKey, columns: int, rows: int) -> RemoteTerminal: ...


class TerminalMessage(msgspec.Struct, frozen=True):
    """What the page sends: what was typed, a new size, or how many bytes it has drawn."""

    typed: str = ""
    size: tuple[int, int] | None = None
    drawn: int = 0


def open_seat_terminal(
    course: CourseActions, key: TerminalKey, columns: int, rows: int
) -> RemoteTerminal:
    """Open a terminal of a lab on a seat's server."""
    lab, server = course.open_lab(key.seat, key.lab_id)
    return open_server_terminal(lab, server, key.session, columns, rows)


class StudentTerminals:
    """The page with a terminal, and the WebSocket behind it."""

    def __init__(
        self, page: StudentPage, open_terminal: TerminalOpener, notify: Callable[[str], None]
    ) -> None:
        self._page = page
        self._open_terminal = open_terminal
        self._notify = notify
        self._counts: Counter[str] = Counter()

    def add_to(self, app: FastAPI) -> None:
        add_routes(app, "GET", {PATH: self.show})
        app.add_api_websocket_route(f"{PATH}/socket", self.relay)

    async def show(self, request: Request, lab_id: str) -> Response:
        key, lab = await self._find_key(request, lab_id)
        snapshot = await self._page.feed.read_snapshot()
        scripts = ("xterm.js", "addon-fit.js", "terminal.js")
        response = self._page.render_page(
            request, snapshot, "student_terminal", lab=lab, lab_id=key.lab_id, scripts=scripts
        )
        response.headers["content-security-policy"] = TERMINAL_POLICY
        return response

    async def _find_key(self, connection: HTTPConnection, lab_id: str) -> tuple[TerminalKey, str]:
        """Return the terminal and the name of its lab; NotFoundError unless the student has it."""
        _, person, seat = await self._page.find_seat(connection)
        standing = await asyncio.to_thread(self._page.actions.find_standing, person.id, seat)
        labs = dict(standing.labs)
        if lab_id not in labs or not is_usable(standing, seat):
            raise NotFoundError("you have no such lab on a running server")
        return TerminalKey(student=person.id, seat=seat.name, lab_id=lab_id), labs[lab_id]

    async def relay(
        self, browser: WebSocket, lab_id: str, columns: int = 80, rows: int = 24
    ) -> None:
        """Connect the browser to a terminal, until one of them ends or the student loses access."""
        try:
            key, _ = await self._find_key(browser, lab_id)
        except LabError:
            await browser.close(REFUSED)
            return
        if self._counts[key.student] >= MOST_OWN or self._counts.total() >= MOST_IN_ALL:
            await browser.accept()
            await _report(browser, "Too many terminals are open. Close one, then reload the page.")
            return
        self._counts[key.student] += 1
        try:
            await browser.accept()
            await self._run(browser, key, _limit_size(columns, rows))
        finally:
            self._counts[key.student] -= 1

    async def _run(self, browser: WebSocket, key: TerminalKey, size: tuple[int, int]) -> None:
        try:
            terminal = await asyncio.to_thread(self._open_terminal, key, *size)
        except Exception as error:
            await _report(browser, describe_failure(as_lab_error(error, self._notify)))
            return
        connection = TerminalConnection(browser, terminal)
        tasks = [
            asyncio.create_task(connection.send_output()),
            asyncio.create_task(connection.receive_input()),
            asyncio.create_task(connection.type_input()),
            asyncio.create_task(self._wait_for_loss(browser, key)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(terminal.close)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the browser has left
            await browser.close()

    async def _wait_for_loss(self, browser: WebSocket, key: TerminalKey) -> None:
        """Return once the student does not have the lab on a running server any more."""
        with contextlib.suppress(NotFoundError):
            while True:
                await asyncio.sleep(CHECK_EVERY_S)
                await self._find_key(browser, key.lab_id)


class TerminalConnection:
    """A terminal and the browser that shows it."""

    def __init__(self, browser: WebSocket, terminal: RemoteTerminal) -> None:
        self._browser = browser
        self._terminal = terminal
        self._unseen_bytes = 0
        self._has_drawn = asyncio.Event()
        self._typed = bytearray()
        self._has_typed = asyncio.Event()

    async def send_output(self) -> None:
        """Send what the terminal prints, no faster than the browser draws, until it ends."""
        while True:
            await _wait_for(self._terminal.fileno(), is_read=True)
            with contextlib.suppress(BlockingIOError):
                if not (data := self._terminal.read()):
                    return
                self._unseen_bytes += len(data)
                await self._browser.send_bytes(data)
            while self._unseen_bytes > MOST_UNSEEN_BYTES:
                self._has_drawn.clear()
                await self._has_drawn.wait()

    async def receive_input(self) -> None:
        """Receive what the browser sends, until it leaves or sends something else.

        It never waits for a program: one that reads nothing must not hide that the browser left.
        """
        while True:
            try:
                text = await self._browser.receive_text()
                message = decode_json(text, TerminalMessage)
            except (WebSocketDisconnect, KeyError, msgspec.MsgspecError):
                return
            self._unseen_bytes = max(0, self._unseen_bytes - max(0, message.drawn))
            self._has_drawn.set()
            if message.size is not None:
                self._terminal.resize(*_limit_size(*message.size))
            self._typed += message.typed.encode()
            if len(self._typed) > MOST_UNREAD_BYTES:
                await _report(self._browser, PASTED)
                return
            self._has_typed.set()

    async def type_input(self) -> None:
        """Type what was received, as fast as the terminal takes it."""
        while True:
            await self._has_typed.wait()
            try:
                del self._typed[: self._terminal.write(bytes(self._typed[:WRITE_BYTES]))]
            except BlockingIOError:
                await _wait_for(self._terminal.fileno(), is_read=False)
            except OSError:  # it has ended; its last output may not be sent yet
                self._typed.clear()
            if not self._typed:
                self._has_typed.clear()


async def _wait_for(fd: int, *, is_read: bool) -> None:
    """Wait until a descriptor can be read, or written."""
    loop, is_ready = asyncio.get_running_loop(), asyncio.Event()
    add, remove = (
        (loop.add_reader, loop.remove_reader) if is_read else (loop.add_writer, loop.remove_writer)
    )
    add(fd, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        remove(fd)


async def _report(browser: WebSocket, problem: str) -> None:
    await browser.send_json({"problem": problem})
    await browser.close(BUSY)


def _limit_size(columns: int, rows: int) -> tuple[int, int]:
    return max(2, min(columns, 500)), max(2, min(rows, 300))

"""Access to the page for students: sign-in by join code, checked again for every request.

A session ends with its code: a new invitation, or `active: no` in the roster, also closes the
streams that are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

from itsdangerous import Signer
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from labctl.courses import join_codes
from labctl.courses.records.folder import CourseFolder
from labctl.errors import LabError, PolicyError
from labctl.web.auth import SESSION_S, Session
from labctl.web.responses import refuse

SIGN_IN = "/sign-in"
STATIC = "/static/"
# failed tries in WINDOW_S: of one student from one address, and of one student in all
MOST_TRIES, MOST_TRIES_IN_ALL = 10, 100
WINDOW_S = 15 * 60.0
# addresses and students that are remembered
MOST_KEYS = 20_000
# requests of one student, with the streams and WebSockets that are open
MOST_AT_ONCE = 200
# how soon a student who lost access loses open streams too
CHECK_EVERY_S = 1.0


class StudentSession(Session, frozen=True):
    """A browser that a student signed in. Without a student it is not signed in."""

    student: str = ""


class SignInLimiter:
    """Counts failed tries to sign in. Used from one event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures: dict[tuple[str, str], deque[float]] = {}

    def check(self, student: str, address: str) -> None:
        """Raise PolicyError after too many failed tries."""
        tries = self._count((student, address)), self._count((student, ""))
        if tries[0] >= MOST_TRIES or tries[1] >= MOST_TRIES_IN_ALL:
            raise PolicyError(
                "there were too many failed tries",
                why=f"wait {WINDOW_S / 60:.0f} minutes, or ask your instructor for a new join file",
            )

    def record_failure(self, student: str, address: str) -> None:
        if len(self._failures) > MOST_KEYS:
            self._failures = {key: tries for key, tries in self._failures.items() if tries}
        for key in ((student, address), (student, "")):
            self._failures.setdefault(key, deque(maxlen=MOST_TRIES_IN_ALL)).append(self._now())

    def _count(self, key: tuple[str, str]) -> int:
        tries = self._failures.get(key)
        while tries and tries[0] < self._now() - WINDOW_S:
            tries.popleft()
        return len(tries or ())


class StudentAccess:
    """The students who may use the page now. It has its own CourseFolder."""

    def __init__(self, path: Path) -> None:
        self._folder = CourseFolder(path)
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        # active student -> seat
        self._seats: dict[str, str] = {}
        self._limiter = SignInLimiter()
        # (student, code) -> the requests that are being answered
        self._open: dict[tuple[str, str], set[asyncio.Task[None]]] = defaultdict(set)

    def sign_in(self, student: str, code: str, address: str) -> dict[str, object]:
        """Return the session's data for this student's code; PolicyError for a wrong one."""
        self._limiter.check(student, address)
        is_right = join_codes.is_page_code(self._folder, student, code, time.time())
        if not (is_right and student in self._list_active()):
            self._limiter.record_failure(student, address)
            raise PolicyError(
                "this student id and code do not belong together",
                why="the code is in the join file that you got last; an older file opens nothing",
            )
        join_codes.mark_page_code_used(self._folder, student)
        return {
            "id": secrets.token_urlsafe(16),
            "signed_in_at": int(time.time()),
            "student": student,
            "code": self._fingerprint(student),
        }

    def find_student(self, data: dict[str, object]) -> str:
        """Return the student of a session that is still valid, or ""."""
        student, signed_in_at = data.get("student"), data.get("signed_in_at")
        if not isinstance(student, str) or not isinstance(signed_in_at, int):
            return ""
        is_current = time.time() - signed_in_at < SESSION_S
        return student if is_current and self._is_valid(student, data.get("code")) else ""

    def find_seat(self, student: str) -> str:
        """Return the name of an active student's seat, or ""."""
        return self._list_active().get(student, "")

    def _is_valid(self, student: str, code: object) -> bool:
        return student in self._list_active() and code == self._fingerprint(student) != ""

    def _fingerprint(self, student: str) -> str:
        """Return a name for the student's present code that reveals nothing of it."""
        record = join_codes.read_page_code(self._folder, student)
        return hashlib.sha256(record.public.encode()).hexdigest()[:16] if record else ""

    def _list_active(self) -> dict[str, str]:
        """Return active student -> seat; of the last valid roster while it is being edited."""
        with self._lock:
            with contextlib.suppress(OSError):
                stat = self._folder.roster_file.stat()
                stamp = (stat.st_mtime_ns, stat.st_size)
                if stamp != self._stamp:
                    self._folder.refresh()
                    with contextlib.suppress(LabError):
                        students = self._folder.list_students()
                        self._seats = {one.id: one.seat for one in students}
                        self._stamp = stamp
            return self._seats

    async def run_while_valid(
        self, data: dict[str, object], app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request of this session, and stop doing so if the student loses access."""
        key = (str(data["student"]), str(data["code"]))
        if len(self._open[key]) >= MOST_AT_ONCE:
            await refuse("too many requests at once; close some pages", 429)(scope, receive, send)
            return

        async def answer() -> None:
            await app(scope, receive, send)

        task = asyncio.create_task(answer())
        self._open[key].add(task)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._open[key].discard(task)
            if not self._open[key]:
                del self._open[key]
        if not task.cancelled():
            task.result()
        elif scope["type"] == "websocket":
            with contextlib.suppress(RuntimeError):
                await send({"type": "websocket.close", "code": 1008})

    async def watch(self) -> None:
        """End the requests of students who lost access, until this is canceled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            for (student, code), tasks in list(self._open.items()):
                if not self._is_valid(student, code):
                    for task in tasks:
                        task.cancel()


class RequireStudent:
    """Passes on requests of signed-in students, with `scope["state"]["session"]`.

    Starlette's SessionMiddleware must run before it. A browser that is not signed in gets the
    sign-in page only; that form has no token, and SameOrigin protects it.
    """

    def __init__(self, app: ASGIApp, access: StudentAccess, key: str) -> None:
        self.app = app
        self._access = access
        self._signer = Signer(key, salt="labctl.web.student-form")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        data = scope["session"]
        is_public = scope["path"] == SIGN_IN or scope["path"].startswith(STATIC)
        student = "" if is_public else self._access.find_student(data)
        csrf = self._signer.get_signature(data["id"]).decode() if student else ""
        session = StudentSession(id=data["id"] if student else "", csrf=csrf, student=student)
        scope.setdefault("state", {})["session"] = session
        if is_public:
            await self.app(scope, receive, send)
        elif not student:
            await _answer_stranger(scope)(scope, receive, send)
        else:
            await self._access.run_while_valid(data, self.app, scope, receive, send)


def _answer_stranger(scope: Scope) -> Response:
    headers = Headers(scope=scope)
    if scope["method"] == "GET" and headers.get("sec-fetch-mode", "navigate") == "navigate":
        return RedirectResponse(SIGN_IN, 303)
    return refuse("this browser is not signed in, or its session has ended; sign in again")


def is_entrance(scope: Scope) -> bool:
    """Tell whether a person followed a link to the page, for example from a learning platform."""
    headers = Headers(scope=scope)
    return (
        scope["method"] == "GET"
        and scope["path"] in ("/", SIGN_IN)
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )

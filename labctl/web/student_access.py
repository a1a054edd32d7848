"""Access to the page for students: sign-in by join code, checked again for every request.

A session ends with its code: a new invitation, or `active: no` in the roster, also closes the
streams that are open. So do its age, and another seat of the student.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from itsdangerous import Signer
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from labctl.courses import join_codes
from labctl.courses.records.folder import CourseFolder
from labctl.errors import LabError, PolicyError
from labctl.model import Value
from labctl.web.auth import SESSION_S, Session
from labctl.web.responses import refuse

SIGN_IN, BEGIN, DONE = "/sign-in", "/sign-in/institution", "/sign-in/institution/done"
# addresses for browsers that are not signed in
PUBLIC = (SIGN_IN, BEGIN, DONE)
# in the address of the sign-in page, after a session has ended, and if a form was sent too late
ENDED, UNSENT = "ended", "unsent"
STATIC = "/static/"
# failed tries in WINDOW_S: of one student from one address, of one student in all, and from one
# address in all, behind which may be a campus
MOST_TRIES, MOST_TRIES_IN_ALL, MOST_TRIES_FROM = 10, 100, 300
WINDOW_S = 15 * 60.0
# counts that are kept before old ones are dropped
MOST_KEYS = 20_000
# characters of a name, with one more so that what is too long stays wrong
LONGEST_STUDENT = 40
BY_EMAIL = "email-"
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
        # (student, address), one of which may be "" for all -> times of failed tries
        self._failures: dict[tuple[str, str], deque[float]] = {}

    def check(self, student: str, address: str) -> None:
        """Raise PolicyError after too many failed tries."""
        limits = {
            (student, address): MOST_TRIES,
            (student, ""): MOST_TRIES_IN_ALL,
            ("", address): MOST_TRIES_FROM,
        }
        if any(self._count(key) >= most for key, most in limits.items()):
            raise PolicyError(
                "there were too many failed attempts",
                why=f"wait {WINDOW_S / 60:.0f} minutes, or ask your instructor for a new join file",
            )

    def record_failure(self, student: str, address: str) -> None:
        if len(self._failures) > MOST_KEYS:
            self._failures = {
                key: tries for key, tries in self._failures.items() if self._count(key)
            }
        for key in ((student, address), (student, ""), ("", address)):
            self._failures.setdefault(key, deque(maxlen=MOST_TRIES_FROM)).append(self._now())

    def _count(self, key: tuple[str, str]) -> int:
        tries = self._failures.get(key)
        while tries and tries[0] < self._now() - WINDOW_S:
            tries.popleft()
        return len(tries or ())


class SessionKey(Value, frozen=True):
    """What must be valid for a session to go on.

    `code` stands for the student's join code or, from their institution, for their e-mail address.
    `signed_in_at` is in Unix seconds.
    """

    student: str
    code: str
    id: str
    signed_in_at: int


class StudentAccess:
    """The students who may use the page now. It has its own CourseFolder.

    `ended` has the ids of sessions that were signed out; the origins of a course share it.
    """

    def __init__(self, path: Path, ended: set[str]) -> None:
        self._ended = ended
        self._folder = CourseFolder(path)
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        # active student -> seat, and -> e-mail address in lower case
        self._seats: dict[str, str] = {}
        self._emails: dict[str, str] = {}
        self._limiter = SignInLimiter()
        # the requests that are being answered, each with what must stay true, and how many of each
        # student
        self._open: dict[asyncio.Task[None], tuple[SessionKey, Callable[[], bool]]] = {}
        self._counts: Counter[str] = Counter()

    def sign_in(self, student: str, code: str, address: str) -> dict[str, object]:
        """Return the session's data for this student's code; PolicyError for a wrong one."""
        student = student[:LONGEST_STUDENT]  # the limiter keeps what anybody sent
        self._limiter.check(student, address)
        is_right = join_codes.is_page_code(self._folder, student, code, time.time())
        if not (is_right and student in self._list_active()):
            self._limiter.record_failure(student, address)
            raise PolicyError(
                "this student id and code do not match",
                why="use the join file that you got last; an older one does not work any more",
            )
        join_codes.mark_page_code_used(self._folder, student)
        return _make_session(student, self._fingerprint(student))

    def sign_in_by_email(self, email: str) -> dict[str, object]:
        """Return the session's data for the student with this verified e-mail address.

        PolicyError unless exactly one active student has it.
        """
        self._list_active()
        students = [student for student, own in self._emails.items() if email and own == email]
        if len(students) != 1:
            raise PolicyError(
                "the course has no student with your e-mail address",
                why="ask your instructor to correct the roster, or sign in with your join file",
            )
        return _make_session(students[0], _hash_email(email))

    def sign_out(self, session_id: str) -> None:
        """End a session, also for copies of its cookie."""
        self._ended.add(session_id)

    def find_student(self, data: dict[str, object]) -> str:
        """Return the student of a session that is still valid, or ""."""
        key = _read_key(data)
        return key.student if self._is_valid(key) else ""

    def find_seat(self, student: str) -> str:
        """Return the name of an active student's seat, or ""."""
        return self._list_active().get(student, "")

    def _is_valid(self, key: SessionKey) -> bool:
        if time.time() - key.signed_in_at >= SESSION_S or key.id in self._ended:
            return False
        if key.student not in self._list_active():
            return False
        if key.code.startswith(BY_EMAIL):
            return key.code == _hash_email(self._emails.get(key.student, ""))
        return key.code == self._fingerprint(key.student) != ""

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
                        self._emails = {one.id: one.email.strip().lower() for one in students}
                        self._stamp = stamp
            return self._seats

    async def run_while_valid(
        self,
        data: dict[str, object],
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        is_allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Answer a request of this session, and stop doing so if the student loses access.

        That is also when they get another seat, or when `is_allowed` says no.
        """
        key = _read_key(data)
        seat = self.find_seat(key.student)

        def can_stay() -> bool:
            return self.find_seat(key.student) == seat and is_allowed()

        if self._counts[key.student] >= MOST_AT_ONCE:
            await refuse("too many requests at once; close some pages", 429)(scope, receive, send)
            return

        async def answer() -> None:
            await app(scope, receive, send)

        task = asyncio.create_task(answer())
        self._open[task] = (key, can_stay)
        self._counts[key.student] += 1
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            del self._open[task]
            self._counts[key.student] -= 1
        if not task.cancelled():
            task.result()
        elif scope["type"] == "websocket":
            with contextlib.suppress(RuntimeError):
                await send({"type": "websocket.close", "code": 1008})

    async def watch(self) -> None:
        """End the requests of students who lost access, until this is canceled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            keys = {key for key, _ in self._open.values()}
            is_valid = {key: self._is_valid(key) for key in keys}
            for task, (key, can_stay) in self._open.items():
                if not (is_valid[key] and can_stay()):
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
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        data = scope["session"]
        is_public = scope["path"] in PUBLIC or scope["path"].startswith(STATIC)
        student = "" if is_public else self._access.find_student(data)
        csrf = self._signer.get_signature(data["id"]).decode() if student else ""
        session = StudentSession(id=data["id"] if student else "", csrf=csrf, student=student)
        scope.setdefault("state", {})["session"] = session
        if is_public:
            await self.app(scope, receive, send)
        elif not student and scope["type"] == "websocket":
            await WebSocket(scope, receive, send).close(1008)
        elif not student:
            await _answer_stranger(scope, receive, send)
        else:
            await self._access.run_while_valid(data, self.app, scope, receive, send)


def _make_session(student: str, code: str) -> dict[str, object]:
    return {
        "id": secrets.token_urlsafe(16),
        "signed_in_at": int(time.time()),
        "student": student,
        "code": code,
    }


def _hash_email(email: str) -> str:
    """Return what stands for a student's code in a session of their institution."""
    return BY_EMAIL + hashlib.sha256(email.encode()).hexdigest()[:16]


def _read_key(data: dict[str, object]) -> SessionKey:
    student, code, session_id = (str(data.get(name, "")) for name in ("student", "code", "id"))
    at = data.get("signed_in_at")
    signed_in_at = at if isinstance(at, int) else 0
    return SessionKey(student=student, code=code, id=session_id, signed_in_at=signed_in_at)


async def _answer_stranger(scope: Scope, receive: Receive, send: Send) -> None:
    was_signed_in, is_get = bool(scope["session"].get("student")), scope["method"] == "GET"
    is_navigation = Headers(scope=scope).get("sec-fetch-mode", "navigate") == "navigate"
    if is_navigation and (is_get or was_signed_in):
        ended = f"?{ENDED if is_get else UNSENT}" if was_signed_in else ""
        await RedirectResponse(f"{SIGN_IN}{ended}", 303)(scope, receive, send)
    else:
        answer = refuse("this browser is not signed in, or its session has ended; sign in again")
        await answer(scope, receive, send)


def session_of(request: HTTPConnection) -> StudentSession:
    session: StudentSession = request.scope["state"]["session"]
    return session


def is_entrance(scope: Scope) -> bool:
    """Tell whether a person followed a link to the page, for example from a learning platform."""
    headers = Headers(scope=scope)
    return (
        scope["method"] == "GET"
        and scope["path"] in ("/", SIGN_IN, DONE)
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )

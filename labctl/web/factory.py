"""Construction of a dashboard: its data sources, its actions, and its middleware."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from labctl.config import Paths
from labctl.courses.records.folder import CourseFolder
from labctl.courses.requests import RequestHandler
from labctl.courses.server_submissions import ServerSubmissions
from labctl.state import State
from labctl.web.app import Dashboard
from labctl.web.auth import SESSION_S, LoginLink, RequireSession, read_or_create_key
from labctl.web.csrf import FormToken, SameOrigin
from labctl.web.live_updates import EVERY_S, Feed
from labctl.web.marking_page import MarkingPages
from labctl.web.marking_view import MarkingReader
from labctl.web.mutations import CourseActions
from labctl.web.pages import Pages
from labctl.web.regrade_answers import RegradeAnswers
from labctl.web.responses import SecurityHeaders
from labctl.web.server_load import LoadReader
from labctl.web.service_proxy import RequireService, ServiceProxy
from labctl.web.snapshot import SnapshotTaker
from labctl.web.student_access import RequireStudent, StudentAccess, is_entrance
from labctl.web.student_actions import StudentActions
from labctl.web.student_page import StudentPage
from labctl.web.student_services import StudentServices, open_seat_service
from labctl.web.student_terminal import open_seat_terminal

if TYPE_CHECKING:
    from labctl.web.institution_sign_in import InstitutionSignIn

# in the course's .course/keeper (0600); deleting it ends all sessions
KEY_FILE = "dashboard-key"
STUDENT_KEY_FILE = "student-page-key"
# on any port: `ssh -L 9000:127.0.0.1:8600` must work too
HOSTS = ("127.0.0.1", "localhost", "[::1]")
# a rubric with long notes in a script of three bytes for each character, as a form encodes it
MAX_FORM_BYTES = 256 * 1024


def build_dashboard(
    path: Path, course_id: str, paths: Paths, state: State, *, url_file: str
) -> Dashboard:
    """Build the dashboard of the course at `path`, with its own CourseFolder for its thread."""
    folder = CourseFolder(path)
    actions = CourseActions(path, paths, state)
    load_reader = LoadReader(actions.read_load)
    snapshot_taker = SnapshotTaker(folder, state, load_reader.recent_loads)
    private = folder.private / "keeper"
    link = LoginLink(private / url_file)
    key = read_or_create_key(private / KEY_FILE)
    dashboard = Dashboard(
        Feed(snapshot_taker.take, EVERY_S),
        Pages(paths.data_dir / "templates" / "dashboard"),
        link,
        actions,
        load_reader,
        folder.drop,
        build_middleware(link, key, f"labctl-{course_id[:8]}"),
    )
    reader = MarkingReader(path)
    marking = MarkingPages(dashboard, reader)
    marking.add_to(dashboard.app)
    RegradeAnswers(marking, reader).add_to(dashboard.app)
    return dashboard


def build_student_page(
    path: Path,
    course_id: str,
    paths: Paths,
    state: State,
    *,
    url: str,
    services_url: str,
    institution: InstitutionSignIn | None,
    request_handler: RequestHandler,
    notify: Callable[[str], None],
) -> tuple[StudentPage, ServiceProxy | None]:
    """Build the page for the students of the course at `path`, which browsers open at `url`.

    It shares nothing with the staff's dashboard but the code: another key, cookie and origin. With
    `services_url`, the second value serves students' services at that origin.
    """
    folder = CourseFolder(path)
    key, ended = read_or_create_key(folder.private / "keeper" / STUDENT_KEY_FILE), set[str]()
    access = StudentAccess(path, ended)
    actions = CourseActions(path, paths, state)
    services = proxy = None
    if services_url:
        services = StudentServices(request_handler, partial(open_seat_service, actions), notify)
        cookie = f"labctl-services-{course_id[:8]}"
        own = StudentAccess(path, ended)
        proxy = build_service_proxy(own, services, services_url, url, cookie)
    page = StudentPage(
        Feed(SnapshotTaker(folder, state).take, EVERY_S),
        Pages(paths.data_dir / "templates" / "dashboard"),
        access,
        StudentActions(request_handler, actions),
        folder.drop,
        build_student_middleware(access, key, url, f"labctl-student-{course_id[:8]}"),
        services,
        services_url,
        institution,
        ServerSubmissions(path, paths, notify=notify),
        partial(open_seat_terminal, actions),
        notify,
    )
    return page, proxy


def build_service_proxy(
    access: StudentAccess, services: StudentServices, origin: str, page: str, cookie: str
) -> ServiceProxy:
    """Build the origin of services. Its sessions end with this process, as its forwards do."""
    middleware = [
        _allow_hosts([urlsplit(origin).hostname or ""]),
        _keep_sessions(secrets.token_urlsafe(32), cookie, origin),
        Middleware(RequireService, access=access, services=services, origin=origin, page=page),
    ]
    return ServiceProxy(access, services, middleware)


def build_student_middleware(
    access: StudentAccess, key: str, url: str, cookie: str
) -> list[Middleware]:
    """Return the middleware of the page for students, the outermost first."""
    parts = urlsplit(url)
    return _protect_forms(
        _allow_hosts([parts.hostname or ""]),
        Middleware(SameOrigin, scheme=parts.scheme, is_entrance=is_entrance),
        _keep_sessions(key, cookie, url),
        Middleware(RequireStudent, access=access, key=key),
    )


def build_middleware(link: LoginLink, key: str, cookie: str) -> list[Middleware]:
    """Return the middleware of every route, the outermost first.

    `cookie` is a name per course, because cookies are shared by all ports of a host.
    """
    return _protect_forms(
        _allow_hosts(HOSTS),
        Middleware(SameOrigin),
        _keep_sessions(key, cookie, "", same_site="strict"),
        Middleware(RequireSession, link=link, key=key),
    )


def _protect_forms(*sign_in: Middleware) -> list[Middleware]:
    """Return what surrounds the middleware that knows the session: headers, and checked forms."""
    return [
        Middleware(SecurityHeaders),
        *sign_in,
        Middleware(RequestBodyLimitMiddleware, max_body_size=MAX_FORM_BYTES),
        Middleware(FormToken),
    ]


def _allow_hosts(hosts: Sequence[str]) -> Middleware:
    return Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)


def _keep_sessions(
    key: str, cookie: str, origin: str, same_site: Literal["lax", "strict"] = "lax"
) -> Middleware:
    """Return the middleware that signs the cookie of sessions.

    At an https origin the cookie is Secure, and its prefix keeps other hosts and ports of the same
    domain from setting it. A lax one is sent with links from other sites too, which open the page
    but change nothing.
    """
    is_secure = urlsplit(origin).scheme == "https"
    return Middleware(
        SessionMiddleware,
        secret_key=key,
        session_cookie=f"__Host-{cookie}" if is_secure else cookie,
        max_age=SESSION_S,
        same_site=same_site,
        https_only=is_secure,
    )

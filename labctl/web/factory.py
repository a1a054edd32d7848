"""A dashboard put together: what it reads from, what it may do, who is let in."""

from __future__ import annotations

from pathlib import Path

from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from labctl.config import Paths
from labctl.courses.loading import open_course
from labctl.state import State
from labctl.web.app import Dashboard
from labctl.web.auth import SESSION_S, LoginLink, RequireSession, read_or_create_key
from labctl.web.csrf import FormToken, SameOrigin
from labctl.web.live_updates import EVERY_S, Feed
from labctl.web.mutations import Deeds
from labctl.web.pages import Pages
from labctl.web.responses import SecurityHeaders
from labctl.web.server_load import Gauges
from labctl.web.snapshot import Survey

# In the course's .course/keeper (0600). Without it nobody is signed in any more.
KEY_FILE = "dashboard-key"
# By any port: `ssh -L 9000:127.0.0.1:8600` is a way here too.
HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_FORM_BYTES = 16 * 1024


def dashboard(
    path: Path, course_id: str, paths: Paths, state: State, *, url_file: str
) -> Dashboard:
    """The dashboard of the course at `path`. The folder is opened anew, for its own thread."""
    folder = open_course(path)
    deeds = Deeds(path, paths, state)
    gauges = Gauges(deeds.look)
    survey = Survey(folder, state, gauges.known)
    private = folder.private / "keeper"
    link = LoginLink(private / url_file)
    key = read_or_create_key(private / KEY_FILE)
    return Dashboard(
        Feed(survey.take, EVERY_S),
        Pages(paths.data_dir / "templates" / "dashboard"),
        link,
        deeds,
        gauges,
        folder.drop,
        build_middleware(link, key, f"labctl-{course_id[:8]}"),
    )


def build_middleware(link: LoginLink, key: str, cookie: str) -> list[Middleware]:
    """What stands before every route, the outermost first.

    `cookie` is this course's own name for it: cookies know hosts, not ports. It is not Secure: the
    dashboard speaks plain HTTP, on the loopback alone.
    """
    return [
        Middleware(SecurityHeaders),
        Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        Middleware(SameOrigin),
        Middleware(
            SessionMiddleware,
            secret_key=key,
            session_cookie=cookie,
            max_age=SESSION_S,
            same_site="strict",
        ),
        Middleware(RequireSession, link=link, key=key),
        Middleware(RequestBodyLimitMiddleware, max_body_size=MAX_FORM_BYTES),
        Middleware(FormToken),
    ]

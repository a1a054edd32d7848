"""The HTTP servers of the dashboard and of the page for students: a socket and a thread each."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from labctl.config import Paths
from labctl.config.installation import install_command
from labctl.courses.records.folder import CourseFolder
from labctl.errors import BusyError, LabError, UsageError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.state import State

if TYPE_CHECKING:
    from labctl.courses.requests import RequestHandler
    from labctl.web.institution_sign_in import InstitutionSignIn
    from labctl.web.web_site import WebSite

with lazy_imports(__name__):
    import uvicorn

    from labctl.web import factory, institution_sign_in, request_deadline

HOST = "127.0.0.1"
PORT = 8600
STUDENT_PORT = 8610
SERVICES_PORT = 8611
# in the course's `.course/keeper` (0600): the URL that signs in the next browser
URL_FILE = "dashboard-url"
START_S = 60.0
POLL_S = 0.1
END_S = 5.0
# largest message of a WebSocket, such as an output of a notebook
MOST_MESSAGE_BYTES = 64 * 1024**2
REQUIRED_MODULES = (
    *("fastapi", "uvicorn", "jinja2", "itsdangerous", "python_multipart"),
    *("httpx2", "httpcore2", "websockets", "authlib"),
)


class StudentSettings(Value, frozen=True):
    """Where the page for students listens, and the address that their browsers open.

    With `tls_cert` and `tls_key` (files) it listens on all addresses; without them on the loopback,
    for a proxy on this machine. `url` is an origin, such as https://labs.example.edu; by default
    the port on the loopback. `services_url` is the origin of Jupyter and TensorBoard, on
    `services_port`; with a `url` and without it, they are not offered. With the `oidc` fields,
    students can also sign in at that issuer (`OpenIdSettings`).
    """

    port: int = STUDENT_PORT
    url: str = ""
    services_port: int = SERVICES_PORT
    services_url: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    oidc_issuer: str = ""
    oidc_client_id: str = ""
    oidc_secret_file: str = ""


def serve_dashboard(
    folder: CourseFolder,
    paths: Paths,
    state: State,
    *,
    port: int = PORT,
    stop: threading.Event,
) -> str:
    """Serve the dashboard in a thread until `stop` is set, and return the URL to open once.

    The dashboard answers when this returns. `port` 0 chooses a free port. Web packages are imported
    only here. LabError if the extra `labctl[web]` is missing, BusyError if the port is in use.
    """
    require_extra()
    listener = _open_listener(port)
    dashboard = factory.build_dashboard(folder.path, folder.id, paths, state, url_file=URL_FILE)
    url = dashboard.link.open(f"http://{HOST}:{listener.getsockname()[1]}")
    _start_server(dashboard, listener, stop, on_closed=dashboard.link.close)
    return url


def serve_student_page(
    folder: CourseFolder,
    paths: Paths,
    state: State,
    settings: StudentSettings,
    *,
    request_handler: RequestHandler,
    stop: threading.Event,
    notify: Callable[[str], None] = lambda text: None,
) -> str:
    """Serve the page for students in a thread until `stop` is set, and return its URL.

    Like `serve_dashboard` otherwise. `request_handler` is the keeper's; `notify` gets what staff
    must know.
    """
    require_extra()
    host = "" if settings.tls_cert else HOST
    listener = _open_listener(settings.port, host)
    url = parse_origin(settings.url or f"http://{HOST}:{listener.getsockname()[1]}")
    services_listener, services_url = None, settings.services_url
    if services_url or not settings.url:
        services_listener = _open_listener(settings.services_port, host)
        # another host than the page's, so that neither gets the other's cookies
        own = f"http://localhost:{services_listener.getsockname()[1]}"
        services_url = parse_origin(services_url or own)
    page, proxy = factory.build_student_page(
        folder.path,
        folder.id,
        paths,
        state,
        url=url,
        services_url=services_url,
        institution=_make_institution(settings, url, notify),
        request_handler=request_handler,
        notify=notify,
    )
    _start_server(page, listener, stop, settings)
    if proxy is not None and services_listener is not None:
        _start_server(proxy, services_listener, stop, settings)
    return url


def _make_institution(
    settings: StudentSettings, url: str, notify: Callable[[str], None]
) -> InstitutionSignIn | None:
    if not settings.oidc_issuer:
        return None
    open_id = institution_sign_in.OpenIdSettings(
        issuer=settings.oidc_issuer,
        client_id=settings.oidc_client_id,
        secret_file=settings.oidc_secret_file,
    )
    return institution_sign_in.InstitutionSignIn(open_id, url, notify)


def parse_origin(text: str) -> str:
    """Return an origin such as https://labs.example.edu; UsageError for another text."""
    parts = urlsplit(text)
    origin = f"{parts.scheme}://{parts.netloc}"
    if parts.scheme not in ("http", "https") or not parts.hostname or text.rstrip("/") != origin:
        raise UsageError(
            f"{text[:80]!a} is not the address of a page",
            why="it must be a scheme, a host name and maybe a port",
            hint="--students-url https://labs.example.edu",
        )
    return origin


def _start_server(
    site: WebSite,
    listener: socket.socket,
    stop: threading.Event,
    settings: StudentSettings | None = None,
    *,
    on_closed: Callable[[], None] = lambda: None,
) -> None:
    """Serve the site until `stop` is set; call `on_closed` once its port is free again."""
    server = SiteServer(site, listener, settings or StudentSettings())

    def close() -> None:
        server.close_after(stop)
        on_closed()

    closer = threading.Thread(target=close, name="labctl-dashboard-end", daemon=True)
    closer.start()
    if not server.wait_until_ready():
        stop.set()
        closer.join(END_S)
        raise LabError(
            "the dashboard did not start",
            why=repr(site.start_error) if site.start_error else "",
            hint="labctl course serve --dashboard",
        )


class SiteServer:
    """A site that a thread of its own serves, from the creation of this object on."""

    def __init__(self, site: WebSite, listener: socket.socket, settings: StudentSettings) -> None:
        self._site = site
        self._listener = listener
        self._ready = threading.Event()
        site.on_start.append(self._ready.set)
        self._server = uvicorn.Server(
            uvicorn.Config(
                site.app,
                http=request_deadline.DeadlineProtocol,
                log_level="critical",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
                ws_max_size=MOST_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                ssl_certfile=settings.tls_cert or None,
                ssl_keyfile=settings.tls_key or None,
            )
        )
        self._thread = threading.Thread(target=self._run, name="labctl-dashboard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):  # what uvicorn raises if the start fails
            self._server.run(sockets=[self._listener])

    def wait_until_ready(self) -> bool:
        """Wait until the dashboard answers; False if its thread ended or START_S is over."""
        deadline_s = time.monotonic() + START_S
        while not self._ready.wait(POLL_S):
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                return False
        return True

    def close_after(self, stop: threading.Event) -> None:
        """Wait for `stop`, then end the server and its thread, and release the port."""
        stop.wait()
        with contextlib.suppress(RuntimeError):  # the server's loop has ended already
            self._site.close()
        self._server.should_exit = True
        self._thread.join(END_S)
        self._listener.close()


def require_extra() -> None:
    """Raise LabError if the packages of the extra `labctl[web]` are not installed."""
    missing = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(
            "the dashboard needs the extra labctl[web]",
            why=f"not installed: {', '.join(missing)}",
            hint=install_command("web"),
        )


def _open_listener(port: int, host: str = HOST) -> socket.socket:
    if not 0 <= port < 65536:
        raise UsageError(
            f"{port} is not a port", hint=f"labctl course serve --dashboard --port {PORT}"
        )
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise BusyError(
                f"port {port} cannot be used for the dashboard",
                why=error.strerror or "",
                hint="labctl course serve --dashboard --port 0   # chooses a free one",
            ) from None
        raise
    return listener

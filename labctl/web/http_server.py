"""The dashboard's HTTP server: a socket on the loopback interface and a thread."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import socket
import threading
import time
from typing import TYPE_CHECKING

from labctl.config import Paths
from labctl.config.installation import install_command
from labctl.courses.records.folder import CourseFolder
from labctl.errors import BusyError, LabError, UsageError
from labctl.lazy import lazy_imports
from labctl.state import State

if TYPE_CHECKING:
    from labctl.web.app import Dashboard

with lazy_imports(__name__):
    import uvicorn

    from labctl.web import factory

HOST = "127.0.0.1"
PORT = 8600
# in the course's `.course/keeper` (0600): the URL that signs in the next browser
URL_FILE = "dashboard-url"
START_S = 60.0
POLL_S = 0.1
END_S = 5.0
REQUIRED_MODULES = ("fastapi", "uvicorn", "jinja2", "itsdangerous", "python_multipart")


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
    _require_extra()
    listener = _open_listener(port)
    dashboard = factory.build_dashboard(folder.path, folder.id, paths, state, url_file=URL_FILE)
    url = dashboard.link.open(f"http://{HOST}:{listener.getsockname()[1]}")
    server = DashboardServer(dashboard, listener)
    closer = threading.Thread(
        target=server.close_after, args=(stop,), name="labctl-dashboard-end", daemon=True
    )
    closer.start()
    if not server.wait_until_ready():
        stop.set()
        closer.join(END_S)
        raise LabError(
            "the dashboard did not start",
            why=repr(dashboard.start_error) if dashboard.start_error else "",
            hint="labctl course serve --dashboard",
        )
    return url


class DashboardServer:
    """A dashboard that a thread of its own serves, from the creation of this object on."""

    def __init__(self, dashboard: Dashboard, listener: socket.socket) -> None:
        self._dashboard = dashboard
        self._listener = listener
        self._ready = threading.Event()
        dashboard.on_start.append(self._ready.set)
        self._server = uvicorn.Server(
            uvicorn.Config(
                dashboard.app,
                log_level="critical",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
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
        """Wait for `stop`, then end the server, its thread and its link."""
        stop.wait()
        with contextlib.suppress(RuntimeError):  # the server's loop has ended already
            self._dashboard.feed.close()
        self._server.should_exit = True
        self._thread.join(END_S)
        self._listener.close()
        self._dashboard.link.close()


def _require_extra() -> None:
    missing = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(
            "the dashboard needs the extra labctl[web]",
            why=f"not installed: {', '.join(missing)}",
            hint=install_command("web"),
        )


def _open_listener(port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise UsageError(
            f"{port} is not a port", hint=f"labctl course serve --dashboard --port {PORT}"
        )
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
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

"""The dashboard's HTTP server: a socket on the loopback interface and a thread."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import socket
import threading
import time

from labctl.config import Paths
from labctl.config.installation import install_command
from labctl.courses.records.folder import CourseFolder
from labctl.errors import BusyError, LabError, UsageError
from labctl.state import State

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
    missing = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(
            "the dashboard needs the extra labctl[web]",
            why=f"not installed: {', '.join(missing)}",
            hint=install_command("web"),
        )
    import uvicorn

    from labctl.web.factory import build_dashboard

    listener = _open_listener(port)
    dashboard = build_dashboard(folder.path, folder.id, paths, state, url_file=URL_FILE)
    ready = threading.Event()
    dashboard.on_start.append(ready.set)
    server = uvicorn.Server(
        uvicorn.Config(
            dashboard.app,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )
    url = dashboard.link.open(f"http://{HOST}:{listener.getsockname()[1]}")

    def run_server() -> None:
        with contextlib.suppress(SystemExit):  # what uvicorn raises if the start fails
            server.run(sockets=[listener])

    thread = threading.Thread(target=run_server, name="labctl-dashboard", daemon=True)
    thread.start()

    def wait_and_close() -> None:
        stop.wait()
        with contextlib.suppress(RuntimeError):  # the server's loop has ended already
            dashboard.feed.close()
        server.should_exit = True
        thread.join(END_S)
        listener.close()
        dashboard.link.close()

    closer = threading.Thread(target=wait_and_close, name="labctl-dashboard-end", daemon=True)
    closer.start()
    deadline_s = time.monotonic() + START_S
    while not ready.wait(POLL_S):
        if not thread.is_alive() or time.monotonic() > deadline_s:
            stop.set()
            closer.join(END_S)
            raise LabError(
                "the dashboard did not start",
                why=repr(dashboard.start_error) if dashboard.start_error else "",
                hint="labctl course serve --dashboard",
            )
    return url


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

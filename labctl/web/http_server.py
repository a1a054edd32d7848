"""The dashboard's HTTP server: a socket on the loopback interface and a thread."""

from __future__ import annotations

import errno
import importlib.util
import socket
import threading

from labctl.config import Paths
from labctl.courses.records.folder import CourseFolder
from labctl.errors import BusyError, LabError, UsageError
from labctl.state import State

HOST = "127.0.0.1"
PORT = 8600
# in the course's `.course/keeper` (0600): the URL that signs in the next browser
URL_FILE = "dashboard-url"
START_S = 60.0
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
            hint="pip install 'labctl[web]'",
        )
    import uvicorn

    from labctl.web.factory import build_dashboard

    listener = _open_listener(port)
    board = build_dashboard(folder.path, folder.id, paths, state, url_file=URL_FILE)
    ready = threading.Event()
    board.on_start.append(ready.set)
    server = uvicorn.Server(
        uvicorn.Config(
            board.app,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )
    url = board.link.open(f"http://{HOST}:{listener.getsockname()[1]}")
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="labctl-dashboard", daemon=True
    )
    thread.start()

    def wait_and_close() -> None:
        stop.wait()
        board.feed.close()
        server.should_exit = True
        thread.join(END_S)
        listener.close()
        board.link.close()

    threading.Thread(target=wait_and_close, name="labctl-dashboard-end", daemon=True).start()
    if not ready.wait(START_S):
        stop.set()
        raise LabError("the dashboard did not start", hint="labctl course serve --dashboard")
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

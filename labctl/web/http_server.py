"""The dashboard's own server: a socket on the loopback, one thread, an end when it is told to."""

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
# Below the course's `.course/keeper`: always the URL that lets the next browser in (0600).
URL_FILE = "dashboard-url"
START_S = 60.0
END_S = 5.0
NEEDED = ("fastapi", "uvicorn", "jinja2", "itsdangerous", "python_multipart")


def run(
    folder: CourseFolder,
    paths: Paths,
    state: State,
    *,
    port: int = PORT,
    stop: threading.Event,
) -> str:
    """Serve the dashboard from a thread of its own until `stop` is set; the URL to open, once.

    It answers when this returns; nothing heavy is imported before. `port` 0 takes any free one.
    LabError where the extra `labctl[web]` is missing, BusyError where the port is taken.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(
            "the dashboard needs labctl's extra `web`",
            why=f"not installed: {', '.join(missing)}",
            hint="pip install 'labctl[web]'",
        )
    import uvicorn

    from labctl.web.factory import dashboard

    listener = _listener(port)
    made = dashboard(folder.path, folder.id, paths, state, url_file=URL_FILE)
    ready = threading.Event()
    made.on_start.append(ready.set)
    server = uvicorn.Server(
        uvicorn.Config(
            made.app,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )
    url = made.link.open(f"http://{HOST}:{listener.getsockname()[1]}")
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="labctl-dashboard", daemon=True
    )
    thread.start()

    def end() -> None:
        stop.wait()
        made.feed.close()
        server.should_exit = True
        thread.join(END_S)
        listener.close()
        made.link.close()

    threading.Thread(target=end, name="labctl-dashboard-end", daemon=True).start()
    if not ready.wait(START_S):
        stop.set()
        raise LabError("the dashboard did not start", hint="labctl course serve --dashboard")
    return url


def _listener(port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise UsageError(f"{port} is no port", hint="labctl course serve --dashboard --port {PORT}")
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
                hint="labctl course serve --dashboard --port 0   # any free one",
            ) from None
        raise
    return listener

"""The instructor's dashboard of a course: server-rendered pages on this machine's loopback.

Nothing heavy is imported before `run` is called.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labctl.config import Paths
    from labctl.courses.folder import CourseFolder
    from labctl.state import State

__all__ = ["PORT", "URL_FILE", "run"]

PORT = 8420
URL_FILE = "dashboard-url"
"""Below the course's `.course/keeper`: always the URL that lets the next browser in (0600)."""


def run(
    folder: CourseFolder,
    paths: Paths,
    state: State,
    *,
    port: int = PORT,
    stop: threading.Event,
) -> str:
    """Serve the dashboard from a thread of its own until `stop` is set; the URL to open, once.

    It is there when this returns. `port` 0 takes any free one. LabError where the extra
    `labctl[web]` is missing, BusyError where the port is taken.
    """
    from labctl.dashboard.serving import serve

    return serve(folder, paths, state, port=port, stop=stop, url_file=URL_FILE)

"""A dashboard put together: what it reads from, what it may do, who is let in."""

from __future__ import annotations

from pathlib import Path

from labctl.actions.courses import open_course
from labctl.config import Paths
from labctl.dashboard.app import Dashboard, build_middleware
from labctl.dashboard.auth import LoginLink, read_or_create_key
from labctl.dashboard.deeds import Deeds
from labctl.dashboard.feed import EVERY_S, Feed
from labctl.dashboard.gauges import Gauges
from labctl.dashboard.pages import Pages
from labctl.dashboard.survey import Survey
from labctl.state import State

# In the course's .course/keeper (0600). Without it nobody is signed in any more.
KEY_FILE = "dashboard-key"


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

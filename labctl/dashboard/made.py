"""A dashboard put together: what it reads from, what it may do, who is let in."""

from __future__ import annotations

from pathlib import Path

from labctl.actions.courses import open_course
from labctl.config import Paths
from labctl.dashboard.app import Dashboard
from labctl.dashboard.deeds import Deeds
from labctl.dashboard.doorkeeper import Sessions
from labctl.dashboard.feed import EVERY_S, Feed
from labctl.dashboard.gauges import Gauges
from labctl.dashboard.pages import Pages
from labctl.dashboard.survey import Survey
from labctl.state import State


def dashboard(
    path: Path, course_id: str, paths: Paths, state: State, *, url_file: str
) -> Dashboard:
    """The dashboard of the course at `path`. The folder is opened anew, for its own thread."""
    folder = open_course(path)
    deeds = Deeds(path, paths, state)
    gauges = Gauges(deeds.look)
    survey = Survey(folder, state, gauges.known)
    return Dashboard(
        Feed(survey.take, EVERY_S),
        Pages(paths.data_dir / "templates" / "dashboard"),
        Sessions(folder.private / "keeper" / url_file),
        deeds,
        gauges,
        folder.drop,
        course_id,
    )

"""The transcripts of docs/tracking.md, replayed."""

from __future__ import annotations

import sys
from pathlib import Path

from transcripts import list_steps, make_session, replay

from labctl.config import find_paths

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from compared_runs import write_runs

PAGE = Path(__file__).parents[2] / "docs" / "tracking.md"


def test_the_page_shows_what_compare_prints(tmp_path: Path) -> None:
    project = tmp_path / "digits"
    project.mkdir()
    (project / "lab.yaml").write_text("lab: digits\n")
    session = make_session(tmp_path, project, {})
    database = find_paths(session.environ).database
    database.parent.mkdir(parents=True, exist_ok=True)
    write_runs(session.directory, database, ("baseline", "smaller"))
    assert "\n".join(replay(PAGE, "compare", session)) == ""
    assert len(list_steps(PAGE, "compare")) == 3

"""The transcripts of docs/grading.md that need no server, replayed."""

from __future__ import annotations

from pathlib import Path

from transcripts import list_steps, make_session, replay

from labctl.courses.records.folder import make_private

GUIDE = Path(__file__).parents[2] / "docs" / "grading.md"
COURSE = Path(__file__).parents[1] / "guide" / "ml"


def test_the_page_shows_what_labctl_prints(tmp_path: Path) -> None:
    session = make_session(tmp_path, COURSE, {})
    make_private(session.directory)
    assert "\n".join(replay(GUIDE, "here", session)) == ""


def test_the_page_has_transcripts() -> None:
    # Guards the replay: a pattern that finds no transcript would let it pass.
    assert len(list_steps(GUIDE, "here")) > 4
    assert len(list_steps(GUIDE, "server")) > 0

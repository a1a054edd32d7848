"""The transcripts of docs/instructor.md, replayed against a simulated AWS without machines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transcripts import list_steps, make_session, replay

from labctl.rehearsal.aws import Rehearsal, Scenario
from labctl.rehearsal.core.scenario import override_scenario

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "instructor.md"
FILES = ROOT / "tests" / "guide" / "class"
SWITCHES = ("types=[g4dn.xlarge, g5.xlarge]", "spot.prices={g4dn.xlarge: 0.18, g5.xlarge: 0.40}")
SCENARIO = override_scenario(Scenario(boot="none"), SWITCHES)


@pytest.mark.long
def test_the_guide_shows_what_labctl_prints(tmp_path: Path) -> None:
    with Rehearsal(SCENARIO) as cloud:
        session = make_session(tmp_path, FILES, cloud.environment)
        assert "\n".join(replay(GUIDE, "aws", session)) == ""


def test_every_transcript_of_the_guide_is_replayed() -> None:
    # Guards the replay: a pattern that finds no transcript would let it pass.
    text = GUIDE.read_text()
    assert len(list_steps(GUIDE, "aws")) > 20
    assert text.count("```console\n") == text.count("<!-- transcript: ")


def test_every_task_of_the_guide_has_a_transcript() -> None:
    _, *tasks = re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)
    without = [task.partition("\n")[0] for task in tasks if "<!-- transcript: " not in task]
    assert without == ["Limits"]

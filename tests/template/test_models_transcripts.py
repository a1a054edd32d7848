"""The transcripts of docs/models.md that train on this machine, replayed."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import transcripts
from template_project import REPOSITORY
from transcripts import make_session, replay

PAGE = REPOSITORY / "docs" / "models.md"
pytestmark = [pytest.mark.train, pytest.mark.long]


@pytest.mark.parametrize(
    ("name", "needs"),
    [("writer", "torch"), ("tune", "peft"), ("kernel", "torch")],
)
def test_the_page_shows_what_the_projects_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, needs: str
) -> None:
    # A busy machine trains slowly.
    monkeypatch.setattr(transcripts, "DEADLINE_S", 1800.0)
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    if name == "kernel" and shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    (tmp_path / "empty").mkdir()
    # With another number of threads sums are rounded otherwise.
    environ = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    session = make_session(tmp_path, tmp_path / "empty", environ)
    assert "\n".join(replay(PAGE, name, session)) == ""

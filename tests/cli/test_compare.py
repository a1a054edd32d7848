"""compare, and report with several runs, as they are typed."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from labctl.config import ensure_lab_id, find_paths
from labctl.model import Run
from labctl.state import State

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from compared_runs import write_runs


@pytest.fixture
def pulled(home: Path) -> Path:
    return write_runs(home / "digits", find_paths().database, ("baseline", "smaller"))


def test_two_runs_side_by_side(labctl: Any, pulled: Path) -> None:
    Path("notes.md").write_text("# Mine\n![x](gone.png)")  # is of no concern here
    said = labctl("compare", "baseline", "smaller")
    assert said.code == 0, said.err
    lines = [line.split() for line in said.out.splitlines()]
    assert next(line for line in lines if line[:1] == ["A"])[:3] == ["A", "baseline", "98.6%"]
    assert ["--width", "64", "32"] in lines
    assert "validation loss  0.03333 at step 30  0.06667 at step 30" in said.out
    assert "A is better: this is significant at 5%." in said.out
    assert "labctl report baseline smaller --open" in said.err
    assert "notes.md" not in said.err
    slides = labctl("report", "baseline", "smaller", "--slides")
    assert slides.out.startswith("runs/baseline/slides.html (")
    assert "notes.md: the picture gone.png is not shown: there is no such file" in slides.err
    assert "<h2>Mine</h2>" in (pulled / "baseline" / "slides.html").read_text()
    found = json.loads(labctl("compare", "baseline", "smaller", "--json").out)["comparison"]
    assert found["pairs"][0]["test"] == {
        "only_first": 10,
        "only_second": 0,
        "p_value": 2 / 2**10,
        "method": "exact",
    }


def test_the_report_of_several_runs_is_one_page(labctl: Any, pulled: Path) -> None:
    said = labctl("report", "baseline", "smaller")
    assert said.code == 0, said.err
    assert said.out.startswith("runs/baseline/comparison.html (")
    page = (pulled / "baseline" / "comparison.html").read_text()
    assert "Run A is better" in page
    assert page.count('class="line s') == 2
    assert "http" not in page.replace("http-equiv", "")


def test_missing_predictions_are_named_and_never_compared(labctl: Any, pulled: Path) -> None:
    (pulled / "smaller" / "evaluation.json").unlink()
    said = labctl("compare", "baseline", "smaller")
    assert said.code == 0
    assert "A and B are not compared: B was not evaluated." in said.out
    assert "next: labctl eval smaller" in said.out
    assert "labctl eval smaller" in labctl("report", "baseline", "smaller").err


def record_code(root: Path, run: str, files: dict[str, str], **code: Any) -> None:
    """Record a run of the lab, beside those of the fixture, with the code that was pushed."""
    own = ensure_lab_id(root)
    digest = hashlib.sha256(repr(files).encode()).hexdigest()
    detail = {"command": ["python", "train.py"], "code_sha256": digest, "files": files, **code}
    with State(find_paths().database) as state:
        ended = Run(id=run, lab_id=own, server_id="s1", state="exited", exit_code=0)
        state.save_run(ended)
        state.record("code", lab_id=own, server_id="s1", run_id=run, detail=detail)
    (root / "runs" / run).mkdir(parents=True)


def test_code_that_differs_is_named(labctl: Any, home: Path) -> None:
    root = home / "digits"
    record_code(root, "before", {"train.py": "1" * 16, "model.py": "2" * 16})
    record_code(root, "after", {"train.py": "3" * 16, "model.py": "2" * 16, "new.py": "4" * 16})
    record_code(root, "again", {"train.py": "1" * 16, "model.py": "2" * 16})
    record_code(root, "long-ago", {}, code_sha256="")
    said = labctl("compare", "before", "after")
    assert "The pushed code differs: new.py, train.py." in said.out
    labctl("report", "before", "after")
    page = (root / "runs" / "before" / "comparison.html").read_text()
    assert "The pushed code differs: new.py, train.py." in page
    assert "The pushed code is the same." in labctl("compare", "before", "again").out
    unknown = labctl("compare", "before", "long-ago").out
    assert "not compared: the code of B was not recorded." in unknown.replace("\n", " ")


def test_a_run_without_checkpoints_is_not_to_be_evaluated(labctl: Any, home: Path) -> None:
    root = home / "digits"
    record_code(root, "before", {"train.py": "1" * 16})
    record_code(root, "after", {"train.py": "1" * 16})
    said = labctl("compare", "before", "after")
    assert "A was not evaluated, as it saved no checkpoint." in said.out
    assert "labctl eval" not in said.out


def test_wrong_calls_say_what_to_type(labctl: Any, pulled: Path) -> None:
    one = labctl("compare", "baseline")
    assert (one.code, "labctl compare baseline smaller" in one.err) == (2, True)
    assert "labctl compare needs at least two runs" in one.err
    twice = labctl("compare", "baseline", "baseline")
    assert (twice.code, "run baseline is named twice" in twice.err) == (2, True)
    assert labctl("compare", *"abcdefg").code == 2
    profile = "profile-1"  # the oldest, and not one to compare with
    record_code(pulled.parent, profile, {})
    assert profile not in labctl("compare", "smaller").err
    assert "labctl compare smaller baseline" in labctl("compare", "smaller").err
    unknown = labctl("compare", "baseline", "nothing")
    assert unknown.code == 4
    slip = labctl("compare", "baseline", "baselin").err
    assert "did you mean baseline" not in slip
    assert "next: labctl status --all\n" in slip
    assert "labctl compare smaller baseline\n" in labctl("compare", "smaller", "baselin").err
    assert labctl("report", "baseline", "").code == 2

"""compare, and report with several runs, as they are typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from labctl.config import find_paths

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


def test_wrong_calls_say_what_to_type(labctl: Any, pulled: Path) -> None:
    one = labctl("compare", "baseline")
    assert (one.code, "labctl compare baseline smaller" in one.err) == (2, True)
    assert "labctl compare needs at least two runs" in one.err
    twice = labctl("compare", "baseline", "baseline")
    assert (twice.code, "run baseline is named twice" in twice.err) == (2, True)
    assert labctl("compare", *"abcdefg").code == 2
    unknown = labctl("compare", "baseline", "nothing")
    assert unknown.code == 4
    assert labctl("report", "baseline", "").code == 2

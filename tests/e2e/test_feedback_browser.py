"""The feedback page in a browser: on a phone too, nothing is wider than the window."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import keep_picture, measure_overflow
from playwright.sync_api import Browser

from labctl.courses.grading.feedback import render_page
from labctl.courses.grading.record import GradeRecord
from labctl.courses.grading.results import GradeResults, GraderTest

pytest_plugins = ["browser_fixtures"]
pytestmark = pytest.mark.browser
NOTE = "clear names, but the function needs a docstring that says what it does with a zero"
TESTS = (
    GraderTest(name="test_parity.py::test_zero_is_even", score=10, max_score=10),
    GraderTest(name="test_parity.py::test_" + "parity_" * 12, score=0, max_score=10, output="no"),
    GraderTest(name="presentation", score=18, max_score=20, output=NOTE),
)


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_feedback_fits_the_window(browser: Browser, tmp_path: Path, width: int) -> None:
    record = GradeRecord(
        assignment="hw3", seat="ada", students=("ada",), student="ada", number=2,
        received="2026-11-27T23:05:02Z", bundle_sha256="ab" * 32, key="k", outcome="graded",
        points=40, score=28,
    )  # fmt: skip
    file = tmp_path / "feedback.html"
    file.write_text(
        render_page(record, GradeResults(score=28, output=NOTE, tests=TESTS), "x" * 300)
    )
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(file.as_uri())
    keep_picture(page, f"feedback-{width}", full_page=True)
    assert measure_overflow(page) == 0
    note = page.get_by_role("cell", name=NOTE).bounding_box()
    assert note is not None
    assert note["width"] > 200, "a note in a narrow column has a word a line"
    page.close()

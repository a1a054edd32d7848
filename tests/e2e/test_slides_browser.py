"""Slides and PDFs of a report as Chromium shows and prints them.

With LABCTL_SCREENSHOTS, a directory, every slide is kept as a picture.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from chromium import keep_picture, measure_overflow
from playwright.sync_api import Browser

from labctl.errors import NotFoundError
from labctl.insight.compare.comparison import compare_runs
from labctl.insight.compare.page import build_comparison_page
from labctl.insight.report import document
from labctl.insight.report.document import DocumentForm, write_document
from labctl.insight.report.notes import render_notes
from labctl.insight.report.page import build_page
from labctl.insight.report.render import render

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from compared_runs import TRUTH, make_evaluation
from report_facts import data_uri, facts, png

pytest_plugins = ["browser_fixtures"]
pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
TEXT = """# What we tried

1. a wider network
2. *more* augmentation

![a figure](figure.png)

# Long thoughts

""" + "\n\n".join(f"Thought {n}: " + "many words " * 12 for n in range(14))
LOWER_EDGE = """() => Math.max(...[...document.querySelectorAll(".slide:not([hidden]) .body")]
  .map(one => one.getBoundingClientRect().bottom)) - innerHeight"""


def write_slides(folder: Path, text: str = TEXT) -> str:
    first = make_evaluation(TRUTH, [1, *TRUTH[1:]])
    second = make_evaluation(TRUTH, [1, *TRUTH[1:-9], *(1 - one for one in TRUTH[-9:])])
    parts = render_notes(text, lambda source: (data_uri(png()), ""))
    runs = [facts(evaluation=one, text=parts) for one in (first, second)]
    comparison, charts = compare_runs(runs)
    other = build_comparison_page("digits", comparison, charts, made_at=1e9, labctl="1")
    templates = ROOT / "templates" / "report"
    slides = render(build_page(runs[0]), templates, "slides.html.j2", other)
    (folder / "slides.html").write_text(slides)
    return slides


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1920, 1080)])
def test_keys_turn_the_slides_and_each_fits_the_screen(
    browser: Browser, tmp_path: Path, width: int, height: int
) -> None:
    write_slides(tmp_path)
    asked: list[str] = []
    with browser.new_context(viewport={"width": width, "height": height}) as context:
        shown = context.new_page()
        shown.on("request", lambda request: asked.append(request.url))
        shown.on("console", lambda message: pytest.fail(message.text))
        shown.on("pageerror", lambda error: pytest.fail(str(error)))
        address = (tmp_path / "slides.html").as_uri()
        shown.goto(address)
        total = shown.locator(".slide").count()
        for number in range(1, total + 1):
            assert shown.locator(".counter").text_content() == f"{number} / {total}"
            assert shown.locator(".slide:visible").count() == 1
            assert measure_overflow(shown) == 0
            assert shown.evaluate(LOWER_EDGE) <= 0, shown.locator(
                ".slide:visible h2"
            ).all_text_contents()
            keep_picture(shown, f"slides-{width}-{number:02}")
            shown.keyboard.press("ArrowRight")
        assert shown.locator(".counter").text_content() == f"{total} / {total}"
        shown.keyboard.press("Home")
        assert shown.locator(".counter").text_content() == f"1 / {total}"
        shown.keyboard.press("Space")
        shown.keyboard.press("ArrowLeft")
        shown.click(".next")
        assert shown.locator(".slide:visible h2").text_content() == "What we tried"
        assert shown.url.endswith("#2")
        shown.reload()
        assert shown.locator(".slide:visible h2").text_content() == "What we tried"
    assert {one for one in asked if not one.startswith("data:")} <= {address, f"{address}#2"}


def test_slides_run_no_script_but_their_own(browser: Browser, tmp_path: Path) -> None:
    hostile = "# <script>alert(1)</script>\n\n<img src=x onerror=alert(1)>"
    write_slides(tmp_path, hostile)
    page = tmp_path / "slides.html"
    # A script that got into the page in spite of all: the policy allows one hash.
    page.write_text(page.read_text().replace("</body>", "<script>alert(2)</script></body>"))
    with browser.new_context() as context:
        shown = context.new_page()
        shown.on("dialog", lambda dialog: pytest.fail(dialog.message))
        shown.goto(page.as_uri())
        shown.keyboard.press("ArrowRight")
        assert shown.locator(".slide:visible h2").text_content() == "<script>alert(1)</script>"


def test_chromium_prints_the_slides_and_the_report(tmp_path: Path) -> None:
    slides = write_slides(tmp_path)
    size = write_document(slides, tmp_path / "slides.pdf", DocumentForm(slides=True, pdf=True))
    content = (tmp_path / "slides.pdf").read_bytes()
    assert size == len(content)
    assert content.startswith(b"%PDF-")
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    assert (
        slides.count('<section class="slide') <= pages <= slides.count('<section class="slide') + 3
    )
    assert [path.name for path in tmp_path.iterdir() if "labctl-pdf" in path.name] == []
    if folder := os.environ.get("LABCTL_SCREENSHOTS"):
        (Path(folder) / "slides.pdf").write_bytes(content)


def test_without_a_browser_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "BROWSERS", ("no-such-browser",))
    with pytest.raises(NotFoundError, match="no Chromium or Chrome") as raised:
        write_document("<p>", tmp_path / "a.pdf", DocumentForm(pdf=True))
    assert "apt-get install chromium" in raised.value.hint
    assert list(tmp_path.iterdir()) == []

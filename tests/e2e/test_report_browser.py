"""The report as a browser shows it: on a projector, a laptop, a phone and paper, light and dark.

With LABCTL_SCREENSHOTS, a directory, the pages are kept as pictures and as a PDF.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import pytest
from chromium import keep_picture, measure_overflow
from playwright.sync_api import Browser

from labctl.insight.report.page import build_page
from labctl.insight.report.render import render
from labctl.insight.speedup import Speedup, StepTime

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from report_facts import evaluation, facts

pytest_plugins = ["browser_fixtures"]
pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
VARIANTS = ("fp16", "powersgd", "parameters every 8 steps of all processes")
OUTSIDE = """() => [...document.querySelectorAll('text, h1, p, dt, dd, li, figcaption')]
  .filter(one => {
    const box = one.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5);
  })
  .map(one => one.textContent.trim())"""


def written(folder: Path, name: str = "digits") -> Path:
    found = evaluation((name, *"1234567"))
    steps = [(name, 1, 0.4), ("whole", 2, 0.3), ("whole", 4, 0.2), *((v, 4, 0.1) for v in VARIANTS)]
    rows = (
        StepTime(variant=variant, processes=count, seconds_per_step=seconds, bytes_per_step=4.5e6)
        for variant, count, seconds in steps
    )
    speedup = Speedup(rows=tuple(rows), device="cpu", backend="gloo", batch_size=60)
    made = build_page(facts(lab=name, evaluation=found, here=found, server=found, speedup=speedup))
    (folder / "report.html").write_text(render(made, ROOT / "templates" / "report"))
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 720), (1920, 1080)])
def test_it_fits_every_screen_and_asks_nobody(
    browser: Browser, tmp_path: Path, width: int, height: int, scheme: Literal["light", "dark"]
) -> None:
    asked: list[str] = []
    with browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme
    ) as context:
        shown = context.new_page()
        shown.on("request", lambda request: asked.append(request.url))
        shown.on("console", lambda message: pytest.fail(message.text))
        address = written(tmp_path).as_uri()
        shown.goto(address)
        assert [one for one in asked if not one.startswith("data:")] == [address]
        assert measure_overflow(shown) == 0
        assert shown.evaluate(OUTSIDE) == []
        background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 19, 24)"}[scheme]
        # What it is about stands on the first screen.
        assert shown.locator("h1").bounding_box()["y"] < height / 2  # type: ignore[index]
        keep_picture(shown, f"report-{width}-{scheme}", full_page=True)


def test_on_paper_it_is_light_and_a_few_pages(browser: Browser, tmp_path: Path) -> None:
    with browser.new_context(color_scheme="dark") as context:
        shown = context.new_page()
        shown.goto(written(tmp_path).as_uri())
        content = shown.pdf(prefer_css_page_size=True, print_background=True)
        shown.emulate_media(media="print")
        assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
    assert 2 <= content.count(b"/Type /Page\n") <= 6
    if folder := os.environ.get("LABCTL_SCREENSHOTS"):
        (Path(folder) / "report.pdf").write_bytes(content)


def test_hostile_names_do_nothing_and_long_ones_fit(browser: Browser, tmp_path: Path) -> None:
    for name in ("<img src=x onerror=alert(1)>", "</style><script>alert(1)</script>", "w" * 200):
        with browser.new_context(viewport={"width": 390, "height": 844}) as context:
            shown = context.new_page()
            shown.on("dialog", lambda dialog: pytest.fail(dialog.message))
            shown.goto(written(tmp_path, name).as_uri())
            assert name in str(shown.locator("h1, .kicker, nav .name").all_text_contents())
            assert shown.evaluate("document.querySelectorAll('script, img[src=x]').length") == 0
            assert measure_overflow(shown) == 0

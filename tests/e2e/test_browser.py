"""TensorBoard and JupyterLab as a person sees them: in a browser, through a forward.

CHROMIUM names the browser's program where it is not /usr/bin/chromium. With LABCTL_SCREENSHOTS,
a directory, the pages are kept as pictures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from service_lab import Recorder, ServiceLab
from sshd_container import wait_for

from labctl.actions.forwards import Forwarding

pytest_plugins = ["service_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.browser]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PAGE_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def browser_page(browser: Browser) -> Iterator[Page]:
    """A page without cookies, and without a notebook that asks whether it may be left."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        yield context.new_page()


def keep(page: Page, name: str) -> None:
    folder = os.environ.get("LABCTL_SCREENSHOTS", "")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_tensorboard_shows_the_runs_scalars(
    service_lab: ServiceLab, recorder: Recorder, browser_page: Page
) -> None:
    service = service_lab.ensure("tensorboard")
    service_lab.write_scalars("first-run")
    with Forwarding(service_lab.spec(service), recorder) as forward:
        # The server reads the directory anew every few seconds; the page shows what it then knew.
        tags = forward.url + "data/plugin/timeseries/tags"
        wait_for(lambda: "first-run" in browser_page.request.get(tags).text(), 60)
        browser_page.goto(forward.url + "#timeseries")
        run = browser_page.get_by_text("first-run", exact=True).first
        expect(run).to_be_visible(timeout=PAGE_MS)
        name = browser_page.get_by_text("loss_of_digits").first
        expect(name).to_be_visible(timeout=PAGE_MS)
        chart = browser_page.locator("line-chart").first
        expect(chart).to_be_visible(timeout=PAGE_MS)
        keep(browser_page, "tensorboard")


def test_jupyterlab_opens_with_its_token_and_runs_code(
    service_lab: ServiceLab, recorder: Recorder, browser_page: Page
) -> None:
    service = service_lab.ensure("jupyter")
    with Forwarding(service_lab.spec(service), recorder) as forward:
        browser_page.goto(forward.url)
        launcher = browser_page.locator(".jp-LauncherCard", has_text="Python 3").first
        expect(launcher).to_be_visible(timeout=PAGE_MS)
        keep(browser_page, "jupyter-launcher")
        launcher.click()
        # A cell that is run before its kernel answers is dropped without a word.
        expect(browser_page.get_by_text("| Idle")).to_be_visible(timeout=PAGE_MS)
        cell = browser_page.locator(".jp-Notebook .cm-content").first
        cell.click(timeout=PAGE_MS)
        browser_page.keyboard.type("print(6 * 7, __import__('os').getcwd())")
        expect(cell).to_contain_text("getcwd())")
        browser_page.keyboard.press("Shift+Enter")
        said = browser_page.locator(".jp-OutputArea-output").first
        expect(said).to_contain_text("42 /lab/code", timeout=PAGE_MS)
        keep(browser_page, "jupyter-notebook")


def test_jupyterlab_refuses_who_has_no_token(
    service_lab: ServiceLab, recorder: Recorder, browser_page: Page
) -> None:
    service = service_lab.ensure("jupyter")
    with Forwarding(service_lab.spec(service), recorder) as forward:
        browser_page.goto(forward.url.partition("?")[0])
        expect(browser_page.get_by_text("Token authentication is enabled")).to_be_visible()
        assert browser_page.locator(".jp-LauncherCard").count() == 0
        keep(browser_page, "jupyter-refused")

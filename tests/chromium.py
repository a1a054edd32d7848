"""Chromium for the tests that look at pages.

CHROMIUM names another browser's program; the shell without windows takes half the processor time
of the whole browser. With LABCTL_SCREENSHOTS, a directory, the pages are kept as pictures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium-headless-shell")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


@contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


def keep_picture(page: Page, name: str, *, full_page: bool = False) -> None:
    if folder := os.environ.get("LABCTL_SCREENSHOTS"):
        path = Path(folder) / f"{name}.png"
        # Playwright hides the caret with a style that our policy forbids, and the console says so.
        page.screenshot(path=path, full_page=full_page, caret="initial")


def measure_overflow(page: Page) -> int:
    """Return by how many pixels a page is wider than its window."""
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    return int(page.evaluate(wide))


def measure_memory_mb() -> tuple[float, float]:
    """Return the resident memory of this process, where the page's server is, and of Chromium."""
    own = psutil.Process()
    browser = [one for one in own.children(recursive=True) if "chrom" in one.name()]
    return own.memory_info().rss / 1e6, sum(one.memory_info().rss for one in browser) / 1e6


def watch_memory(seconds: float) -> tuple[float, float]:
    """Return by how many MB this process and Chromium grew at most within this time."""
    before = measure_memory_mb()
    most = before
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.2)
        now = measure_memory_mb()
        most = max(most[0], now[0]), max(most[1], now[1])
    return most[0] - before[0], most[1] - before[1]


def sign_in(context: BrowserContext, url: str, student: str, code: str) -> Page:
    """Sign a student in with their join code; return the page once it is updated live."""
    page = context.new_page()
    page.goto(url)
    page.fill("#student", student)
    page.fill("#code", code)
    page.click("button.go")
    expect(page.locator("#live")).to_have_text("live")
    return page

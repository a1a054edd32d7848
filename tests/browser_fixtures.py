"""The fixture of the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import open_browser
from playwright.sync_api import Browser, expect

# Playwright waits for 5 s by default, which a busy machine exceeds.
expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of one file: Playwright's loop runs in their thread."""
    with open_browser() as browser:
        yield browser

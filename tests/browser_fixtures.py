"""The fixture of the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import open_browser
from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of one file: Playwright's loop runs in their thread."""
    with open_browser() as browser:
        yield browser

"""The page of a profile in Chromium, on a phone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from labctl.insight.profile import PAGE_MARK

pytest_plugins = ["browser_fixtures"]
pytestmark = pytest.mark.browser
TEMPLATE = Path(__file__).parents[2] / "templates" / "profile" / "index.html"
PARTS = ("parameters", "gradients", "optimizer", "activations", "other")


def build_profile() -> dict[str, object]:
    sizes = dict.fromkeys(PARTS, 999_500_000)
    memory = {
        "device": "cpu", "peak": sizes, "most": sizes, "timeline": [[0.0, *sizes.values()]] * 2,
    }  # fmt: skip
    return {
        "version": 1, "steps": 1, "step_us": 1e6, "steps_us": [1e6], "phases": {}, "operations": [],
        "kernels": [], "kernel_count": 0, "kernel_us": 0, "gpu_busy": None, "copies_us": 0,
        "syncs": 0, "peak_bytes": 1, "boxes": {"us": 1, "lanes": [], "boxes": []},
        "run": "night", "command": ["train.py"],
        "torch": "2", "device": "cpu", "threads": 1, "cores": 1, "warmup": 3, "memory": memory,
        "predicted": {
            "sizes": sizes, "target": "train.py:build_model", "batch": 32, "item": "1x16x16",
        },
    }  # fmt: skip


def test_the_estimate_is_beside_the_memory_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    text = TEMPLATE.read_text()
    (tmp_path / "page.html").write_text(text.replace(PAGE_MARK, json.dumps(build_profile())))
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((tmp_path / "page.html").as_uri())
    table = page.locator("#memory-rows")
    assert "estimate" in table.inner_text()
    assert table.evaluate("one => one.scrollWidth <= one.parentElement.clientWidth")
    page.close()

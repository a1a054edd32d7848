from __future__ import annotations

from pathlib import Path

import pytest
from lab_ground import World, world


@pytest.fixture
def lab(tmp_path: Path) -> World:
    """A lab whose provider can stop servers."""
    return world(tmp_path)

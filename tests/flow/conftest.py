from __future__ import annotations

from pathlib import Path

import pytest
from lab_world import World, world

from labctl.model import Server
from labctl.servers import guard
from labctl.servers.context import LabContext


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """No watchdog is started here: the server is a directory of this machine, which it would end.

    Holds the budgets that servers were armed with.
    """
    armed: list[float | None] = []

    def arm(
        context: LabContext,
        server: Server,
        *,
        budget_left_usd: float | None,
        ceiling_s: int | None,
    ) -> None:
        armed.append(budget_left_usd)

    monkeypatch.setattr(guard, "arm", arm)
    return armed


@pytest.fixture
def lab(tmp_path: Path) -> World:
    """A lab whose provider can stop servers."""
    return world(tmp_path)

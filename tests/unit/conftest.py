"""What several units' tests stand on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aws_cloud import Cloud


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cloud]:
    """A simulated EC2, empty, and an environment that leads to it and to no real account."""
    from aws_cloud import REGION, forget_rehearsals, running, share_models

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    forget_rehearsals(monkeypatch)
    share_models(monkeypatch)
    with running() as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        yield made

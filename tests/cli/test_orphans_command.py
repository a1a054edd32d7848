"""`labctl orphans` on this machine, whose Docker Engine may be busy."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from labctl.providers import local

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from engine_socket import Answer, engine_socket


def test_an_engine_that_deletes_a_volume_does_not_delay_the_list(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = threading.Event()

    def answer(method: str, path: str, body: Any) -> Answer | None:
        if path.startswith("/version"):
            return 200, {"ApiVersion": "1.41"}
        if "/volumes" in path:
            deleted.wait(60)
        return 200, []

    monkeypatch.setattr(local, "LIST_VOLUMES_S", 1)
    with engine_socket() as engine:
        engine.answers = answer
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        said = labctl("orphans")
        deleted.set()
    assert (said.code, said.out) == (0, "Found nothing at local that labctl created.\n")
    assert "image caches, which are free, are not listed: Docker Engine is busy" in said.err

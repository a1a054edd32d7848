"""`labctl orphans` on this machine, whose Docker Engine may be busy."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labctl.cli import orphans
from labctl.config import find_paths
from labctl.model import Endpoint, Offer, Server
from labctl.providers import local
from labctl.servers.leftovers import Orphans
from labctl.state import State

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


def test_a_narrow_terminal_shows_the_whole_state(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    server = Server(
        id="i-7a913de55893474d3.us-east-1",
        provider="aws",
        lab="birds",
        lab_id="0123456789ab",
        alias="birds",
        endpoint=Endpoint(host="127.0.0.1", port=9, user="ubuntu"),
        offer=Offer(provider="aws", type="g4dn.xlarge", price_usd_per_hour=0.1759),
        created_at=time.time() - 180,
        state="running",
    )
    found = Orphans(servers=(server,), resources=(), here=(server.id,))
    with State(find_paths().database) as state:
        context: Any = SimpleNamespace(state=state)
        orphans._print_orphans(context, found, everyone=False, with_region=True)
    lines = capsys.readouterr().out.splitlines()
    assert "running (on record)" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80

"""What `labctl up` prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labctl.events import BlockerNote, Note
from labctl.lab import Lab, LabServer
from labctl.model import Endpoint, Offer, Server

SERVER = Server(
    id="srv-1",
    provider="local",
    lab="digits",
    lab_id="0f1e2d3c4b5a",
    alias="digits",
    endpoint=Endpoint(host="127.0.0.1"),
    offer=Offer(provider="local", type="container"),
    created_at=1.0,
    state="running",
)


@pytest.mark.parametrize(("count", "servers"), [(1, "the server"), (2, "the servers")])
def test_down_is_said_to_remove_all_servers(
    labctl: Any, monkeypatch: pytest.MonkeyPatch, count: int, servers: str
) -> None:
    Path("lab.yaml").write_text(f"lab: digits\nrun: python\nserver: {{count: {count}}}\n")
    monkeypatch.setattr(Lab, "up", lambda lab, need: LabServer(lab, SERVER))
    assert labctl("up").out.splitlines()[-1].endswith(f"  remove {servers} when you are done")


@pytest.mark.parametrize("note", [Note(text="No GPU"), BlockerNote(text="no run can start yet")])
def test_a_run_is_suggested_only_if_it_can_start(
    labctl: Any, monkeypatch: pytest.MonkeyPatch, note: Note
) -> None:
    def up(lab: Lab, need: Any) -> LabServer:
        lab.context.reporter.emit(note)
        return LabServer(lab, SERVER)

    monkeypatch.setattr(Lab, "up", up)
    first, *suggestions = labctl("up").out.splitlines()
    can_run = not isinstance(note, BlockerNote)
    assert ("is ready" in first) is can_run
    assert ("no run can start yet" in first) is not can_run
    assert any(line.startswith("  labctl run ") for line in suggestions) is can_run
    assert any(line.startswith("  labctl up ") for line in suggestions) is not can_run

"""The live view of a lab with several servers: what ends it, and what it computes when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab_world import DiskCloud, World, world

from labctl.cli import top_all
from labctl.errors import AuthenticationError, ConnectError, HostKeyError, LabError, NotFoundError
from labctl.lifecycle import gang_creation
from labctl.servers import gang
from labctl.servers.context import LabContext
from labctl.transports.fake import FakeTransport


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = world(tmp_path, DiskCloud)
    made.cloud.settle_s = 0.0
    text = "lab: digits\nrun: [python, train.py]\nserver: {count: 2}\n"
    (made.home / "lab" / "lab.yaml").write_text(text)
    return made


def create(lab: World, *errors: LabError) -> LabContext:
    """Create both servers; each then answers with its error."""
    context = lab.context()
    gang_creation.create_missing_servers(context, gang.build_members(context))
    servers = gang.list_servers(context)
    wires = {
        server.id: FakeTransport(replies=[("", error)])
        for server, error in zip(servers, errors, strict=True)
    }
    context.connections.__dict__["open"] = lambda server: wires[server.id]
    return context


def show(context: LabContext) -> None:
    lab: Any = SimpleNamespace(context=context, config=context.config)
    top_all.show_live(lab)


def test_refused_logins_and_wrong_keys_are_not_tried_again(lab: World) -> None:
    refused, wrong_key = AuthenticationError("no login"), HostKeyError("another key")
    context = create(lab, refused, wrong_key)
    with pytest.raises((AuthenticationError, HostKeyError)) as ended:
        show(context)
    assert ended.value in (refused, wrong_key)


def test_the_view_ends_once_no_server_is_on_record(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `labctl down` in another terminal."""
    silent = ConnectError("no route")
    context = create(lab, silent, silent)

    def remove_servers(pause_s: float) -> None:
        for server in context.state.list_servers():
            context.state.drop_server(server.id)

    monkeypatch.setattr("time.sleep", remove_servers)
    with pytest.raises(NotFoundError, match="has no server"):
        show(context)


def test_drawing_does_not_query_the_records(lab: World, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = ConnectError("no route")
    context = create(lab, silent, silent)
    view: Any = SimpleNamespace(context=context, config=context.config)
    console = top_all.rich_console.Console(width=80)
    screen = top_all._OverviewScreen(view, console)
    context.state.close()
    with console.capture() as captured:
        console.print(screen.render())
    assert "digits: 2 servers, free" in captured.get()

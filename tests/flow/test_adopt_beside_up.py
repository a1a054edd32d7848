"""One process looks for the lab's server while another one creates it or gets it ready."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from lab_world import LAB_ID, Cloud, World, world

from labctl.lifecycle.up import up
from labctl.model import Server
from labctl.servers.adoption import adopt
from labctl.servers.host_keys import ensure_key_pair


@pytest.fixture
def lab(tmp_path: Path) -> World:
    return world(tmp_path)


def replace_key(server: Server, key: str) -> Server:
    endpoint = msgspec.structs.replace(server.endpoint, host_key=key)
    return msgspec.structs.replace(server, endpoint=endpoint)


def test_an_earlier_look_does_not_undo_what_up_has_recorded(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = up(lab.context())
    early = replace_key(server, "")  # before its first boot had made a key
    lab.context().state.save_server(early)

    def find_early(cloud: Cloud, server_id: str) -> Server:
        lab.context().state.save_server(server)  # meanwhile, in the other process
        return early

    monkeypatch.setattr(Cloud, "find", find_early)
    assert adopt(lab.context()) == server
    assert lab.context().state.get_server(server.id) == server


def test_a_host_key_that_up_replaces_meanwhile_is_no_mismatch(
    lab: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = up(lab.context())
    replaced = replace_key(server, ensure_key_pair(tmp_path / "own").rpartition(" ")[0])

    def find_replaced(cloud: Cloud, server_id: str) -> Server:
        lab.context().state.save_server(replaced)
        return replaced

    monkeypatch.setattr(Cloud, "find", find_replaced)
    assert adopt(lab.context()) == replaced


def test_a_server_that_up_creates_meanwhile_keeps_its_record_and_its_ssh_name(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = up(lab.context())
    lab.cloud.terminate(gone.id)
    created: list[Server] = []

    def list_before(cloud: Cloud) -> list[Server]:
        found = [*cloud.machines.values()]
        monkeypatch.undo()
        created.append(up(lab.context()))
        return found

    monkeypatch.setattr(Cloud, "servers", list_before)
    context = lab.context()
    assert adopt(context) is None
    (new,) = created
    assert context.state.list_servers(LAB_ID) == [new]
    assert context.connections.config_path(new.id).exists()


def test_a_server_that_down_drops_meanwhile_is_not_recorded_again(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = up(lab.context())

    def find_before(cloud: Cloud, server_id: str) -> Server:
        lab.context().state.drop_server(server_id)
        return server

    monkeypatch.setattr(Cloud, "find", find_before)
    adopt(lab.context())
    assert lab.context().state.list_servers(LAB_ID) == []

"""A server that is off, at a provider that goes on to bill it: a keeper ends it once it is sure."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from lab_world import DiskCloud, Recorded, World, world

from labctl.lifecycle import power_off, server_loss
from labctl.lifecycle import up as provision
from labctl.model import Need, Server
from labctl.servers.context import LabContext


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = world(tmp_path)
    made.cloud.price = 0.5
    monkeypatch.setattr(made.cloud, "ends_billing", frozenset())
    monkeypatch.setattr(server_loss, "DEAD_S", 0.0)
    return made


@pytest.fixture
def sshd() -> Iterator[int]:
    """A port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def up(lab: World) -> Server:
    return provision.up(lab.context(Recorded(), Need()))


def end(lab: World, reporter: Recorded, store: str = "ssh://ann@store/labs") -> tuple[bool, int]:
    context = lab.context(reporter)
    config = msgspec.structs.replace(context.config, store=store)
    stored: LabContext = msgspec.structs.replace(context, config=config)
    stored.__dict__.update(context.__dict__)
    pauses: list[float] = []
    return power_off.end_powered_off(stored, pauses.append), len(pauses)


def test_a_server_that_is_off_is_ended_after_ten_minutes_of_silence(lab: World) -> None:
    server, reporter = up(lab), Recorded()
    ended, pauses = end(lab, reporter)
    assert ended
    assert pauses == server_loss.DEAD_CHECKS - 1
    assert server.id not in lab.cloud.machines
    assert "cloud bills a machine that is off, so it was ended" in reporter.said


def test_the_pauses_add_up_to_more_than_the_silence_that_counts() -> None:
    assert power_off.PAUSE_S * (power_off.CHECKS - 1) > 600.0


def test_one_that_answers_is_left_alone(lab: World, sshd: int) -> None:
    server = up(lab)
    endpoint = msgspec.structs.replace(server.endpoint, port=sshd)
    moved = msgspec.structs.replace(server, endpoint=endpoint)
    lab.context().state.save_server(moved)
    lab.cloud.machines[server.id] = moved
    assert end(lab, Recorded()) == (False, 0)
    assert server.id in lab.cloud.machines


def test_where_a_power_off_ends_the_costs_nothing_is_done(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = up(lab)
    monkeypatch.setattr(lab.cloud, "ends_billing", frozenset({"shutdown"}))
    assert end(lab, Recorded()) == (False, 0)
    assert server.id in lab.cloud.machines


def test_the_only_copy_of_results_is_not_ended(lab: World) -> None:
    """Without a store, and where the provider cannot keep the disk."""
    assert isinstance(lab.cloud, DiskCloud)
    server, reporter = up(lab), Recorded()
    lab.cloud.has_disks = False
    ended, _ = end(lab, reporter, store="")
    assert not ended
    assert server.id in lab.cloud.machines
    assert "labctl down --discard" in reporter.said

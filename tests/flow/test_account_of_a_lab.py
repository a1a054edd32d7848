"""A lab and its keeper with credentials of another account: no recovery, no sweep, no removal."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_world import World, world

from labctl.errors import PolicyError
from labctl.keeper.recovery_worker import SWEPT, sweep
from labctl.lifecycle import server_loss, up
from labctl.lifecycle.server_loss import FailedChecks, ServerGoneError
from labctl.model import ProviderAccount, Server
from labctl.servers import end_server

OURS, OTHER = ProviderAccount(id="111", profile="ours"), ProviderAccount(id="222")


@pytest.fixture
def lab(tmp_path: Path) -> World:
    made = world(tmp_path)
    made.cloud.account, made.cloud.settle_s = OURS, 0.0
    return made


@pytest.fixture
def server(lab: World) -> Server:
    """A ready server of one account; the next process has the credentials of another."""
    found = up.up(lab.context())
    lab.cloud.account = OTHER
    return found


def test_a_server_of_another_account_is_not_lost_to_its_runs(lab: World, server: Server) -> None:
    with pytest.raises(PolicyError):
        server_loss.require_alive(lab.context(), server, FailedChecks())
    lab.cloud.account = OURS
    server_loss.require_alive(lab.context(), server, FailedChecks())
    del lab.cloud.machines[server.id]
    with pytest.raises(ServerGoneError):
        server_loss.require_alive(lab.context(), server, FailedChecks())


def test_a_keeper_sweeps_nothing_in_another_account(lab: World, server: Server) -> None:
    context = lab.context()
    with pytest.raises(PolicyError):
        sweep(context)
    assert context.state.get_server(server.id) is not None
    assert context.state.list_events(kind=SWEPT) == []


def test_no_order_is_given_in_another_account(lab: World, server: Server) -> None:
    context = lab.context()
    lab.cloud.calls.clear()
    with pytest.raises(PolicyError):
        end_server.end(context, [server])
    assert lab.cloud.calls == []
    assert context.state.get_server(server.id) is not None
    assert list(lab.cloud.machines) == [server.id]

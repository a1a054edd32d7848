"""Ten times the servers and runs cost at most ten times the work, whatever the machine does.

Counted, not timed: calls of functions (Python's and C's) and SQLite's own steps.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from lab_world import LAB_ID, Cloud, World, world

from labctl.lifecycle.status import read_status
from labctl.model import Endpoint, Offer, Run, Server
from labctl.servers import cost, end_server
from labctl.servers.connections import Connections
from labctl.servers.context import LabContext
from labctl.servers.fan_out import list_running_servers, run_on_all
from labctl.state import State
from labctl.transports import Result, Transport
from labctl.transports.fake import FakeTransport

SIZES = (1, 10, 100, 1000)
# More than linear by no more than this: what SQLite's trees and sorting take.
SLACK = 1.15
STEPS = 100


def server(number: int, own: bool = False) -> Server:
    return Server(
        id=f"srv-{number}",
        provider="cloud",
        lab=f"digits-{number}",
        lab_id=LAB_ID if own else f"{number:012x}",
        alias=f"digits-{number}",
        endpoint=Endpoint(host=f"gpu{number}.example"),
        offer=Offer(provider="cloud", type="small", price_usd_per_hour=0.5),
        created_at=time.time() - 3600,
        state="running",
    )


def filled(lab: World, count: int) -> LabContext:
    """A record of so many servers, each with its life in the ledger; all runs are the lab's."""
    context = lab.context()
    for number in range(count):
        one = server(number, own=number == 0)
        context.state.save_server(one)
        cost.record_start(context.state, one)
        run = Run(id=f"run-{number}", lab_id=LAB_ID, server_id="srv-0", state="exited")
        context.state.save_run(run)
    return context


def work(state: State, action: Callable[[], object]) -> tuple[int, int]:
    """(calls in every thread, hundreds of SQLite's steps) that `action` takes."""
    calls = steps = 0

    def called(frame: FrameType, event: str, what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def stepped() -> int:
        nonlocal steps
        steps += 1
        return 0

    state._db.set_progress_handler(stepped, STEPS)
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        state._db.set_progress_handler(None, 0)
    return calls, steps


def linear(tmp_path: Path, action: Callable[[LabContext, int], Callable[[], object]]) -> list[int]:
    """The calls of `action` at each size, once they have been found to grow no worse."""
    found = []
    for count in SIZES:
        lab = world(tmp_path / str(count))
        context = filled(lab, count)
        made = action(context, count)
        made()  # what is imported and read once is no growth
        found.append(work(context.state, made))
    for (few, few_steps), (many, many_steps), size in zip(found, found[1:], SIZES, strict=False):
        assert many <= 10 * few * SLACK, (size, found)
        assert many_steps <= 10 * max(few_steps, 10) * SLACK, (size, found)
    return [calls for calls, _ in found]


def test_status(tmp_path: Path) -> None:
    def prepare(context: LabContext, count: int) -> Callable[[], object]:
        def check() -> None:
            assert len(read_status(context, refresh=False).runs) == count

        return check

    calls = linear(tmp_path, prepare)
    assert calls[-1] - calls[0] <= 25 * SIZES[-1], "and little is done for each run"


def test_cost_of_every_lab(tmp_path: Path) -> None:
    def prepare(context: LabContext, count: int) -> Callable[[], object]:
        def check() -> None:
            assert len(cost.compute_costs(context, every_lab=True).servers) == count

        return check

    linear(tmp_path, prepare)


class Wires(Connections):
    def _make_transport(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        return FakeTransport(endpoint).reply("", Result(code=0))


def test_one_command_on_all_servers(tmp_path: Path) -> None:
    def prepare(context: LabContext, count: int) -> Callable[[], object]:
        wires = Wires(context.paths.ssh_dir, None)
        for one in list_running_servers(context.state):
            wires._describe(wires.config_path(one.id).parent, one.id, one.alias, one.endpoint)

        def ask() -> None:
            answers = run_on_all(wires, list_running_servers(context.state), "true", at_once=1)
            assert [one.code for one in answers] == [0] * count

        return ask

    linear(tmp_path, prepare)


@pytest.mark.long
def test_the_end_of_every_server(tmp_path: Path) -> None:
    def prepare(context: LabContext, count: int) -> Callable[[], object]:
        cloud = context.provider
        assert isinstance(cloud, Cloud)

        def end() -> None:
            servers = [server(number) for number in range(count)]
            for one in servers:
                cloud.machines[one.id] = one
                context.state.save_server(one)
            end_server.end(context, servers)
            assert not cloud.machines
            assert not context.state.list_servers()

        return end

    linear(tmp_path, prepare)

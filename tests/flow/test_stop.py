"""`labctl stop` and `labctl start`: the disk stays, and nothing is ended without being named."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from lab_world import LAB_ID, Cloud, DiskCloud, Recorded, World, unreachable, world

from labctl.cli.power import _print_stopped
from labctl.cli.setup import print_ready
from labctl.errors import BudgetError, NotFoundError, PolicyError, ProviderError
from labctl.lifecycle import stop as power
from labctl.lifecycle import up
from labctl.lifecycle.status import read_status
from labctl.model import Forward, Need, Resource, Run, Server
from labctl.servers.cost import sum_stopped_s
from labctl.servers.deadlines import EVENT
from labctl.servers.disks import describe_stopped_disk
from labctl.state.ledgers import HANDED
from labctl.wire.watchdog import ServerLimits

DAY_S = 86_400


class PaidCloud(DiskCloud):
    """One with a price, a disk of $2.40 a month, and a timer that ends servers."""

    missing_deadline_setup = ""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.price = 0.5
        self.timers: dict[str, float] = {}

    def set_deadline(self, server_id: str, at: float) -> None:
        self.timers[server_id] = at

    def leftovers(self) -> list[Resource]:
        return [
            Resource(
                provider="cloud", kind="volume", id=f"v-{id_}", price_usd_per_month=2.4,
                server_id=id_,
            )
            for id_ in (*self.machines, "another-server")
        ]  # fmt: skip


@pytest.fixture
def paid(tmp_path: Path) -> World:
    made = world(tmp_path, PaidCloud)
    up.up(made.context())
    return made


def server_of(lab: World) -> Server:
    (server,) = lab.cloud.machines.values()
    return server


def add_active_run(
    lab: World, monkeypatch: pytest.MonkeyPatch, *, saves_checkpoint: bool = False
) -> list[str]:
    """Put an active run on record; return the list that a cancel adds its name to."""
    run = Run(id="night", lab_id=LAB_ID, server_id=server_of(lab).id, state="running")
    lab.context().state.save_run(run)
    canceled: list[str] = []

    def cancel(context: Any, server: Server, run_id: str, grace_s: int) -> tuple[Run, bool]:
        assert lab.cloud.machines[server.id].state == "running"
        canceled.append(run_id)
        ended = msgspec.structs.replace(run, state="cancelled", summary="canceled")
        if saves_checkpoint:
            ended = msgspec.structs.replace(ended, has_checkpoints=True)
        return ended, False

    monkeypatch.setattr(power.runs, "refresh", lambda context, server: None)
    monkeypatch.setattr(power.runs, "cancel", cancel)
    return canceled


def test_the_disk_stays_and_its_price_is_named_before_and_after(paid: World) -> None:
    reporter = Recorded()
    result = power.stop(paid.context(reporter))
    (question,) = reporter.asked
    assert question.question == "stop the server digits (cloud)?"
    assert "Its disk is kept, with all runs, data and images." in question.detail
    assert "it costs $2.40 a month" in question.detail
    assert max(map(len, question.detail.splitlines())) < 80
    assert paid.cloud.calls == ["create", "stop"]
    assert result.server.state == "stopped"
    assert result.disk is not None
    assert result.disk.usd_per_month == 2.4
    assert result.canceled == ()


def test_after_a_canceled_run_the_way_to_continue_is_named(
    paid: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_active_run(paid, monkeypatch, saves_checkpoint=True)
    _print_stopped(power.stop(paid.context()))
    assert capsys.readouterr().out.endswith(
        "  labctl start && labctl pull night    download the checkpoints of night\n"
        "A new run continues from them with this line below data: in lab.yaml:\n"
        "  start: ./runs/night/checkpoints\n"
    )


def test_after_a_canceled_run_without_checkpoints_nothing_offers_them(
    paid: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_active_run(paid, monkeypatch)
    result = power.stop(paid.context())
    assert (result.canceled, result.with_checkpoints) == (("night",), ())
    _print_stopped(result)
    assert "checkpoints" not in capsys.readouterr().out


def test_closed_forwards_are_named_with_the_command_that_reopens_them(
    paid: World, capsys: pytest.CaptureFixture[str]
) -> None:
    context = paid.context()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", "forwards"]
    services = ("tensorboard", "serve")
    with ExitStack() as held:
        processes = [held.enter_context(subprocess.Popen([*sleep, name])) for name in services]
        for name, process in zip(services, processes, strict=True):
            forward = Forward(
                id=name, server_id=server_of(paid).id, service=name, local_port=6006,
                remote_port=6006, url="http://127.0.0.1:6006/", pid=process.pid, created_at=0.0,
            )  # fmt: skip
            context.state.save_forward(forward)
        result = power.stop(context)
        assert all(process.wait(20) for process in processes)
    assert result.closed_forwards == services
    _print_stopped(result)
    assert "Background forwards are closed: tensorboard and serve." in capsys.readouterr().out
    server = power.start(paid.context())
    lab: Any = SimpleNamespace(context=context, config=context.config)
    print_ready(lab, server)
    said = capsys.readouterr().out
    assert "  labctl forward tensorboard --detach  reopen what labctl stop closed\n" in said
    assert "  labctl serve --detach                reopen what labctl stop closed\n" in said
    power.stop(context)
    power.start(context)
    print_ready(lab, server)
    assert "forward" not in capsys.readouterr().out.replace("labctl forward jupyter", "")


def test_a_timer_at_the_provider_is_moved_and_named(paid: World) -> None:
    context, server = paid.context(), server_of(paid)
    context.state.record(EVENT, lab_id=LAB_ID, server_id=server.id, detail={"at": time.time() + 60})
    disk = power.stop(context).disk
    assert disk is not None
    assert disk.until == pytest.approx(time.time() + 30 * DAY_S, abs=60)
    assert isinstance(paid.cloud, PaidCloud)
    assert paid.cloud.timers[server.id] == disk.until
    assert "the provider's timer removes it on 20" in describe_stopped_disk(disk)


def test_without_a_timer_only_down_removes_it(lab: World) -> None:
    up.up(lab.context())
    disk = power.stop(lab.context()).disk
    assert disk is not None
    told = describe_stopped_disk(disk)
    assert told == "its disk keeps everything on it until you remove it with labctl down"


def test_status_shows_the_disk_of_a_stopped_server_only(paid: World) -> None:
    assert read_status(paid.context(), refresh=False).stopped is None
    power.stop(paid.context())
    assert read_status(paid.context(), refresh=False).stopped.usd_per_month == 2.4
    power.start(paid.context())
    assert read_status(paid.context(), refresh=False).stopped is None


def test_a_second_stop_changes_nothing(paid: World) -> None:
    power.stop(paid.context())
    reporter = Recorded()
    again = power.stop(paid.context(reporter))
    assert again.was_stopped
    assert again.disk is not None
    assert again.disk.usd_per_month == 2.4
    assert (reporter.asked, paid.cloud.calls) == ([], ["create", "stop"])


def test_a_free_server_that_is_not_stopped_is_called_free(lab: World) -> None:
    up.up(lab.context())
    with pytest.raises(PolicyError, match="nothing was stopped") as caught:
        power.stop(lab.context(Recorded(answers=[False])))
    assert caught.value.why == "digits is still running (free)"


def test_an_active_run_is_named_and_a_refusal_changes_nothing(
    paid: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    canceled = add_active_run(paid, monkeypatch)
    reporter = Recorded(answers=[False])
    with pytest.raises(PolicyError, match="nothing was stopped") as caught:
        power.stop(paid.context(reporter))
    assert reporter.asked[0].question.startswith(
        "night is still running and would be canceled; stop the server"
    )
    assert caught.value.why == "digits is still running ($0.50/h)"
    assert caught.value.hint == "labctl status   # shows what runs there"
    assert (canceled, paid.cloud.calls) == ([], ["create"])


def test_an_active_run_is_canceled_before_the_server_stops(
    paid: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    canceled = add_active_run(paid, monkeypatch)
    assert power.stop(paid.context()).canceled == ("night",)
    assert canceled == ["night"]


def test_a_silent_server_can_be_stopped_and_the_question_says_what_is_unknown(
    paid: World,
) -> None:
    paid.machine.error = unreachable()
    reporter = Recorded()
    assert power.stop(paid.context(reporter)).server.state == "stopped"
    assert "digits does not answer: active runs would end" in reporter.asked[0].question


def test_start_asks_for_the_price_and_gets_the_same_server_ready(paid: World) -> None:
    power.stop(paid.context())
    before = server_of(paid).id
    with pytest.raises(NotFoundError, match="is stopped") as caught:
        paid.context().get_server()
    assert caught.value.hint == "labctl start"
    with pytest.raises(PolicyError, match="nothing was started"):
        power.start(paid.context(Recorded(answers=[False])))
    reporter = Recorded()
    server = power.start(paid.context(reporter))
    assert (server.id, server.state) == (before, "running")
    assert reporter.asked[0].question == "start digits again for $0.50/h?"
    assert paid.cloud.calls == ["create", "stop", "start"]


def test_start_never_creates_a_server(lab: World) -> None:
    for action in (power.start, power.stop):
        with pytest.raises(NotFoundError, match="digits has no server") as caught:
            action(lab.context())
        assert caught.value.hint.startswith("labctl up")
    assert lab.cloud.calls == []


def test_a_spent_budget_refuses_the_start(paid: World) -> None:
    power.stop(paid.context())
    context = paid.context(need=Need(budget_usd=1e-9))
    with pytest.raises(BudgetError, match="the budget of digits is used up") as caught:
        power.start(context)
    assert "budget" in caught.value.hint
    assert paid.cloud.calls == ["create", "stop"]


def test_where_servers_cannot_be_stopped_down_is_named(tmp_path: Path) -> None:
    lab = world(tmp_path, Cloud)
    up.up(lab.context())
    reporter = Recorded()
    with pytest.raises(PolicyError, match="digits cannot be stopped") as caught:
        power.stop(lab.context(reporter))
    assert "cloud cannot stop a server and keep its disk" in caught.value.why
    assert caught.value.hint.startswith("labctl down ")
    assert (reporter.asked, lab.cloud.calls) == ([], ["create"])


def test_a_spot_server_is_refused_before_its_runs_are_canceled(
    paid: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    canceled = add_active_run(paid, monkeypatch)
    server = server_of(paid)
    paid.cloud.change(server.id, offer=msgspec.structs.replace(server.offer, spot=True))
    with pytest.raises(PolicyError, match="cannot be stopped") as caught:
        power.stop(paid.context())
    assert "spot" in caught.value.why
    assert canceled == []


def test_a_refusal_of_the_provider_says_why(paid: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(server_id: str) -> None:
        raise ProviderError("instance store volumes cannot be kept")

    monkeypatch.setattr(paid.cloud, "stop", refuse)
    with pytest.raises(PolicyError, match="cannot be stopped") as caught:
        power.stop(paid.context())
    assert "instance store volumes cannot be kept" in caught.value.why
    assert server_of(paid).state == "running"


def test_a_lab_with_a_keeper_is_refused(paid: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power.reconcile, "merge_keeper_records", lambda context: "desk")
    context = paid.context()
    context.state.record(HANDED, lab_id=LAB_ID, detail={"keeper": "desk"})
    with pytest.raises(PolicyError, match="was not stopped") as caught:
        power.stop(context)
    assert "the keeper at desk" in caught.value.why
    assert caught.value.hint.startswith("labctl down")


def test_the_budget_does_not_pay_for_the_time_off() -> None:
    lines = [("created", 0.0), ("stopped", 100.0), ("started", 400.0), ("stopped", 500.0)]
    entries = [SimpleNamespace(kind=kind, at=at) for kind, at in lines]
    state: Any = SimpleNamespace(list_events=lambda server_id: entries)
    assert sum_stopped_s(state, "srv") == 300.0
    limits = ServerLimits(budget_usd=1.0, price_usd_per_hour=1.0, stopped_s=300.0)
    assert limits.budget_end_s == 3900.0

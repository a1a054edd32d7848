"""Messages and files of the watchdog and of telemetry, as other versions read and write them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from labctl.agent.host.gpus import BrokeredGpus
from labctl.agent.host.paths import read_record
from labctl.agent.watchdog.limits import keep_unknown
from labctl.agent.watchdog.state_files import read_limits
from labctl.errors import LabError
from labctl.insight.top import ServerMetrics
from labctl.servers.agent import AgentClient
from labctl.servers.watch_reports import parse_watch
from labctl.transports import Result
from labctl.transports.fake import FakeTransport
from labctl.wire.codec import from_json, to_json
from labctl.wire.telemetry import (
    GpuRecord,
    GpuUseRecord,
    TopContainerRecord,
    TopProcessRecord,
    TopRecord,
)
from labctl.wire.watchdog import WATCH, StateRecord, WatchRecord, WatchReply, WatchRequest

FIRST = Path(__file__).parents[1] / "fixtures" / "first"


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The files of a watchdog of the first version."""
    with tarfile.open(FIRST / "watchdog.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def list_written(body: Any) -> Any:
    """The body without what is new since, which has its default."""
    return json.loads(json.dumps(to_json(body)))


def test_the_files_of_the_first_watchdog_come_back_as_they_were(first: Path) -> None:
    limits = read_limits(first)
    state = read_record(StateRecord, first / "state.json")
    status = read_record(WatchRecord, first / "status.json")
    for record, name in ((limits, "limits"), (state, "state"), (status, "status")):
        before = json.loads((first / f"{name}.json").read_text())
        assert keep_unknown(list_written(record), before) == list_written(record)


def test_the_first_reply_comes_back_as_it_was() -> None:
    body = json.loads((FIRST / "watchdog.reply.json").read_text())
    reply = to_json(from_json(WatchReply, body))
    body["watch"]["gpu_percent"] = None  # new since
    assert reply == body


@pytest.mark.parametrize(
    "report", [{"ttl_left_s": "never"}, {"busy": 1}, {"ends_in_s": 10**400}, [1], 5, {}, None]
)
def test_a_report_that_is_none_says_nothing(report: Any) -> None:
    """Whoever is root on a server may have it report anything."""
    assert parse_watch(report) is None


@pytest.mark.parametrize("report", [{"ttl_left_s": []}, {"ttl_left_s": 10**400}, "never"])
def test_a_forged_reply_is_an_error_and_no_report(report: Any) -> None:
    class Forged(FakeTransport):
        def run(self, *_: Any, **__: Any) -> Result:
            return Result(code=0, stdout=f"\x1elabctl {json.dumps({'watch': report})}\n")

    with pytest.raises(LabError, match="does not understand"):
        AgentClient(Forged()).call(WATCH, WatchRequest("0f1e2d3c4b5a"))


def test_a_sample_of_top_is_what_the_client_shows() -> None:
    import msgspec

    record = TopRecord(
        at=5.0,
        cores=2,
        load=0.5,
        memory_bytes=1,
        memory_total_bytes=2,
        disk_free_bytes=3,
        disk_total_bytes=4,
        gpus=(GpuRecord("0", "GPU-1", throttle=("power",)), GpuRecord("0:1", parent="GPU-1")),
        runs=(TopContainerRecord("2026-01-02T03:04:05Z", 2.0, "digits-night-1", step=3),),
        processes=(TopProcessRecord(7, "python", 0.5, 9, (GpuUseRecord("GPU-1"),)),),
    )
    body = to_json(record, drop_defaults=True)
    assert body["gpus"][0] == {"index": "0", "uuid": "GPU-1", "throttle": ["power"]}
    now = msgspec.convert(body, ServerMetrics)
    pairs = ((now, record), (now.gpus[1], record.gpus[1]), (now.runs[0], record.runs[0]))
    for shown, measured in pairs:
        for name in measured._fields:
            if name not in ("gpus", "runs", "processes", "throttle"):
                assert getattr(shown, name) == getattr(measured, name), name
    assert now.processes[0].gpus[0].uuid == "GPU-1"


def test_a_broker_of_another_version_may_say_more_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from labctl.agent.host import engine

    gpu = {"index": "0", "uuid": "GPU-1", "use_percent": 5, "holder": "alice", "ends_in_s": 60}
    monkeypatch.setattr(engine, "call", lambda *_: json.dumps({"gpus": [gpu]}).encode())
    assert BrokeredGpus().read(False) == [GpuRecord("0", "GPU-1", use_percent=5.0)]
    for answer in (b"", b"[]", b'{"gpus": 5}', b'{"gpus": [[]]}'):
        monkeypatch.setattr(engine, "call", lambda *_, answer=answer: answer)
        assert BrokeredGpus().read(False) == []

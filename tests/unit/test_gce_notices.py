"""Google's notice of a preemption, as the watchdog reads it from a machine's metadata service."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest

from labctl.agent.host.gce_metadata import GceMetadata
from labctl.agent.host.paths import write_json
from labctl.agent.watchdog import imds_notices, notice_services
from labctl.agent.watchdog.notice_services import (
    GCE_NOTICE_S,
    GceNotices,
    NoticeService,
    await_reclaim,
    open_notice_service,
)
from labctl.agent.watchdog.state_files import encode_limits, read_boot_id
from labctl.agent.watchdog.systemd_unit import build_unit_text
from labctl.rehearsal.gcp.metadata import GceMetadataApp
from labctl.wire.codec import to_json
from labctl.wire.verbs import Empty
from labctl.wire.watchdog import (
    ElapsedTimeRecord,
    EndingRecord,
    LimitsRecord,
    ReclaimRecord,
    ServerLimits,
    WatchRecord,
)


class Quiet(WSGIRequestHandler):
    def log_message(self, *words: object) -> None:
        return


class Service:
    """The simulated cloud's own metadata service, on a port of the loopback."""

    def __init__(self) -> None:
        self.pages = {"instance/preempted": "FALSE"}
        self.server = make_server(
            "127.0.0.1", 0, GceMetadataApp(lambda path: self.pages.get(path)), handler_class=Quiet
        )
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def metadata(self) -> GceMetadata:
        return GceMetadata(f"http://127.0.0.1:{self.server.server_port}")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(imds_notices, "PROBE_PAUSES_S", (0.0, 0.0))
    started = Service()
    yield started
    started.server.shutdown()
    started.server.server_close()


def test_a_preemption_is_a_notice_of_thirty_seconds(service: Service) -> None:
    notices = GceNotices(service.metadata)
    assert notices.is_available()
    assert notices.read() == []
    service.pages["instance/preempted"] = "TRUE"
    [notice] = notices.read()
    assert (notice.kind, notice.action, notice.left_s) == ("interruption", "delete", GCE_NOTICE_S)
    assert notices.read() == [notice], "the same notice is acted on once"


def test_a_machine_elsewhere_is_asked_no_more(service: Service) -> None:
    service.pages.clear()
    assert not GceNotices(service.metadata).is_available()


def test_an_unknown_name_has_no_notices() -> None:
    service = open_notice_service("of a later version")
    assert type(service) is NoticeService
    assert (service.is_available(), service.read()) == (False, [])


def make_limits(notices: str) -> LimitsRecord:
    return LimitsRecord(
        edition=1,
        lab="digits",
        lab_id="a1",
        server_id="s1",
        uid=0,
        gid=0,
        home="/root",
        limits=ServerLimits(),
        age=ElapsedTimeRecord(read_boot_id(), 0.0, 0.0, 0.0),
        ending=EndingRecord("poweroff"),
        notices=notices,
    )


@pytest.fixture
def directory(tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A watchdog's directory on a machine at Google."""
    write_json(tmp_path / "limits.json", encode_limits(make_limits("gce")))
    monkeypatch.setattr(notice_services, "GceMetadata", lambda: service.metadata)
    monkeypatch.setattr(sys, "argv", ["agent", "await-reclaim", str(tmp_path)])
    return tmp_path


def test_a_shutdown_without_a_preemption_does_not_wait(directory: Path) -> None:
    began = time.monotonic()
    await_reclaim(Empty())
    assert time.monotonic() - began < 2


def test_the_shutdown_of_a_preemption_waits_until_results_are_saved(
    directory: Path, service: Service
) -> None:
    service.pages["instance/preempted"] = "TRUE"
    waiting = threading.Thread(target=await_reclaim, args=(Empty(),), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    reclaim = ReclaimRecord("interruption", "delete", "Google", 1.0, 2.0, ready_at=3.0)
    status = WatchRecord(alive=True, boot=read_boot_id(), reclaim=reclaim)
    write_json(directory / "status.json", to_json(status))
    waiting.join(5)
    assert not waiting.is_alive()


def test_only_a_unit_at_google_delays_a_shutdown(tmp_path: Path) -> None:
    assert "ExecStop" not in build_unit_text(tmp_path)
    text = build_unit_text(tmp_path, GceNotices.shutdown_s)
    assert f"await-reclaim {tmp_path}" in text
    assert "TimeoutStopSec=28" in text
    assert "After=docker.service network-online.target" in text


def test_limits_of_other_servers_are_written_as_before() -> None:
    body = encode_limits(make_limits(""))
    assert isinstance(body, dict)
    assert "notices" not in body

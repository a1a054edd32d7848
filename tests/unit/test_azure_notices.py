"""Azure's notice of an eviction, as the watchdog reads it from a machine's metadata service."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest

from labctl.agent.host.azure_metadata import AzureMetadata, ScheduledEvent
from labctl.agent.watchdog import imds_notices
from labctl.agent.watchdog.notice_services import AzureNotices, open_notice_service
from labctl.providers.azure import AzureProvider
from labctl.rehearsal.azure.metadata import AzureMetadataApp


class Silent(WSGIRequestHandler):
    def log_message(self, *words: object) -> None:
        return


class EventService:
    """The simulated cloud's own metadata service, on a port of the loopback."""

    def __init__(self) -> None:
        self.evicted_at: float | None = None
        self.server = make_server(
            "127.0.0.1", 0, AzureMetadataApp("vm", lambda: self.evicted_at), handler_class=Silent
        )
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def notices(self) -> AzureNotices:
        return AzureNotices(AzureMetadata(f"http://127.0.0.1:{self.server.server_port}"))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventService]:
    monkeypatch.setattr(imds_notices, "PROBE_PAUSES_S", (0.0, 0.0))
    started = EventService()
    yield started
    started.server.shutdown()
    started.server.server_close()


def test_an_eviction_is_a_notice_until_its_time(service: EventService) -> None:
    notices = service.notices
    assert notices.is_available()
    assert notices.read() == []
    service.evicted_at = time.time() + 30
    [notice] = notices.read()
    assert (notice.kind, notice.action) == ("interruption", "delete")
    assert 25 < notice.left_s <= 31
    service.evicted_at -= 5
    [again] = notices.read()
    assert again.stamp == notice.stamp, "the same notice is acted on once"


def test_an_event_that_has_begun_has_no_time_left() -> None:
    assert ScheduledEvent("1", "Preempt", "").compute_left_s(time.time()) == 0


def test_a_machine_elsewhere_has_no_such_service(service: EventService) -> None:
    assert not AzureNotices(AzureMetadata("http://127.0.0.1:9", 0.2)).is_available()


def test_the_watchdog_knows_the_name_that_the_provider_gives() -> None:
    assert type(open_notice_service(AzureProvider.notice_service)) is AzureNotices

"""Which drills go to the simulated cloud: those of servers that it simulates on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from labctl.errors import UsageError
from labctl.lifecycle import reclaim_drill
from labctl.servers.reclaimer import Reclaimer, find_reclaimer


class ReclaimingProvider:
    """A provider that can take its servers back."""

    name, no_notice = "aws", ""

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        return True


class SimulatedCloud(BaseHTTPRequestHandler):
    """A cloud with one instance."""

    paths: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.paths.append(self.path)
        body = json.dumps({"instances": {"i-1": "running"}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), SimulatedCloud) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield address
        server.shutdown()
        thread.join()


def lab_on(provider: object, server_id: str) -> Any:
    return SimpleNamespace(provider=provider, get_server=lambda: SimpleNamespace(id=server_id))


@pytest.mark.usefixtures("endpoint")
def test_the_simulation_reclaims_its_own_servers() -> None:
    taker = find_reclaimer(lab_on(ReclaimingProvider(), "i-1.us-east-1"))
    assert taker
    assert taker.no_notice
    assert taker.reclaim("i-1.us-east-1", 0)
    assert SimulatedCloud.paths[-1] == "/rehearsal/reclaim"


@pytest.mark.usefixtures("endpoint")
def test_the_provider_reclaims_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = ReclaimingProvider()
    assert find_reclaimer(lab_on(provider, "i-2.us-east-1")) == Reclaimer(provider)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://cloud.example")
    assert find_reclaimer(lab_on(provider, "i-1.us-east-1")) == Reclaimer(provider)


@pytest.mark.usefixtures("endpoint")
def test_a_provider_that_never_reclaims_has_no_drill() -> None:
    with pytest.raises(UsageError, match="never reclaimed"):
        reclaim_drill._require_reclaimer(lab_on(SimpleNamespace(name="static"), "i-1"))

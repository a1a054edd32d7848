"""A preemption at Google on a machine with a real systemd: its shutdown comes with the notice."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_servers import wait_for
from sshd_container import Sshd
from systemd_machine import build_image, machine

from labctl.servers.agent import AgentClient
from labctl.servers.connections import Connections
from labctl.transports.openssh import OpenSshTransport
from labctl.wire.watchdog import GUARD, EndingRecord, GuardLimits, GuardRequest

pytestmark = [pytest.mark.engine, pytest.mark.long]

# Google's metadata service, as far as the watchdog asks it.
METADATA = """
import http.server, pathlib
class Service(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = pathlib.Path("/run/preempted").read_bytes()
        known = self.path == "/computeMetadata/v1/instance/preempted"
        self.send_response(200 if known and self.headers["Metadata-Flavor"] == "Google" else 404)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("169.254.169.254", 80), Service).serve_forever()
"""
DECISIONS = "cat /var/lib/labctl/watchdog/decisions.jsonl"


@pytest.fixture(scope="module")
def box(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with machine(build_image(server_image), tmp_path_factory.mktemp("google")) as made:
        made.sh("ip address add 169.254.169.254/32 dev lo; printf FALSE > /run/preempted")
        made.sh(f"printf %s {shlex.quote(METADATA)} > /run/metadata.py")
        made.sh("systemd-run --unit metadata python3 /run/metadata.py")
        yield made


@pytest.fixture
def guarded(box: Sshd, tmp_path: Path) -> Sshd:
    server = box.server()
    path = Connections(tmp_path / "ssh", None).write(server)
    remote = AgentClient(OpenSshTransport(path, server.id, server.endpoint, master=False))
    ending = EndingRecord("poweroff", "stays", grace_s=10)
    limits = GuardLimits(ttl_s=3600.0)
    remote.call(GUARD, GuardRequest("spot", "77aa5500ee13", "spot", limits, ending, notices="gce"))
    wait_for(lambda: "watching for reclaim" in box.sh(DECISIONS), 60)
    return box


def stop_watchdog(box: Sshd) -> float:
    """Stop the unit as a shutdown does; return how long that took."""
    began = time.monotonic()
    box.sh("systemctl stop labctl-watchdog")
    return time.monotonic() - began


def test_results_are_saved_before_the_shutdown_ends_the_watchdog(guarded: Sshd) -> None:
    assert stop_watchdog(guarded) < 15
    assert "reclaim notice" not in guarded.sh(DECISIONS)
    guarded.sh("systemctl start labctl-watchdog")
    wait_for(lambda: guarded.sh(DECISIONS).count("watching for reclaim") > 1, 60)
    guarded.sh("printf TRUE > /run/preempted")
    assert stop_watchdog(guarded) < 35
    decisions = guarded.sh(DECISIONS)
    assert "Google's metadata service says: delete in" in decisions
    assert "ready for reclaim" in decisions

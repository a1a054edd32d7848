"""Services as plain processes, on this machine: no Docker Engine is asked."""

from __future__ import annotations

import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from labctl.agent.host.paths import lab_dir
from labctl.agent.reply import Failure
from labctl.agent.runs import process_services, service_executors
from labctl.wire.runs import PROCESS
from labctl.wire.services import (
    ListServicesRequest,
    ServiceReply,
    ServiceRequest,
    StopServiceRequest,
)

LAB_ID = "0f1e2d3c4b5a"
SERVE = 'exec python3 -m http.server --bind 127.0.0.1 "$LABCTL_SERVICE_PORT"'


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The lab's directory on the server; what runs ends after the test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = lab_dir("digits", LAB_ID)
    (directory / "code").mkdir()
    (directory / "code" / "train.py").touch()
    yield directory
    process_services.stop_lab_services(LAB_ID)


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_request(line: str = SERVE, **env: str) -> ServiceRequest:
    return ServiceRequest(
        *("digits", LAB_ID, "web", ""),
        command=("sh", "-c", line),
        port=find_port(),
        env=env,
        executor=PROCESS,
    )


def read_page(reply: ServiceReply) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{reply.port}/", timeout=10) as page:
        return str(page.read().decode())


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_it_runs_in_the_code_of_the_lab_and_is_found_again() -> None:
    request = make_request()
    started = service_executors.start(request)
    assert (started.running, started.found) == (True, False)
    assert "train.py" in read_page(started)
    again = service_executors.start(request)
    assert (again.port, again.found, again.stale) == (started.port, True, False)
    listed = service_executors.status(ListServicesRequest("digits", LAB_ID, PROCESS)).services
    assert [(one.name, one.running) for one in listed] == [("web", True)]


def test_code_that_was_never_pushed_is_missing(root: Path) -> None:
    (root / "code" / "train.py").unlink()
    (root / "code").rmdir()
    assert service_executors.start(make_request()).missing == "code"


def test_other_settings_replace_it_only_on_request() -> None:
    request = make_request()
    first = service_executors.start(request)
    changed = request._replace(port=find_port())
    kept = service_executors.start(changed)
    assert (kept.port, kept.stale) == (first.port, True)
    replaced = service_executors.start(changed._replace(replace=True))
    assert (replaced.port, replaced.replaced) == (changed.port, True)
    assert not is_listening(first.port)


def test_stopping_it_ends_all_of_its_processes() -> None:
    line = "sleep 71 & " + SERVE.replace("exec ", "")
    started = service_executors.start(make_request(line))
    stopped = service_executors.stop(StopServiceRequest("digits", LAB_ID, "", PROCESS)).stopped
    assert stopped == ("web",)
    assert not is_listening(started.port)
    assert subprocess.run(["pgrep", "-f", "^sleep 71$"], capture_output=True).returncode == 1
    assert service_executors.status(ListServicesRequest("digits", LAB_ID, PROCESS)).services == ()


def test_one_that_ends_at_once_shows_its_output() -> None:
    with pytest.raises(Failure) as caught:
        service_executors.start(make_request("echo no such model; exit 3"))
    assert caught.value.report.what == "the service web exited right after its start"
    assert caught.value.report.why == "no such model"


def test_the_end_of_a_lease_stops_the_services_of_its_lab_alone() -> None:
    started = service_executors.start(make_request())
    assert process_services.stop_lab_services("another") == ()
    assert is_listening(started.port)
    assert process_services.stop_lab_services(LAB_ID) == ("web",)
    assert not is_listening(started.port)

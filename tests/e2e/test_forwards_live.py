"""Forwards over a real link that is cut, an sshd that is killed, a server that restarts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from calibration import DEAD_LINK_NOTICED_AMONG_OTHERS_S
from guide_session import GUIDE, make_served_session
from service_lab import LAB, LAB_ID, Recorder, ServiceLab
from sleeping import asleep, in_session
from sshd_container import docker, greets, wait_for
from transcripts import replay

from labctl.errors import ConnectError, HostKeyError
from labctl.model import Forward, Service
from labctl.services.background_forwards import (
    BackgroundForwardSpec,
    find_forwards,
    list_forwards,
    start_background_forward,
    stop_forward,
)
from labctl.services.port_forward import Forwarding, ForwardSpec, find_free_port
from labctl.services.services import stop_service
from labctl.state import State

pytest_plugins = ["service_fixtures"]
pytestmark = pytest.mark.engine
BACK_S = 300.0


def get(url: str) -> str:
    """What a browser would get, "" where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            text: str = reply.read().decode()
            return text
    except (urllib.error.URLError, OSError):
        return ""


def works(port: int) -> bool:
    return "hello" in get(f"http://127.0.0.1:{port}/hello.txt")


@pytest.fixture(scope="module")
def web(service_lab: ServiceLab) -> Iterator[Service]:
    yield service_lab.web()
    stop_service(service_lab.remote, LAB, LAB_ID, "web")


@contextmanager
def forwarded(
    lab: ServiceLab,
    service: Service,
    recorder: Recorder,
    refresh: Callable[[], ForwardSpec] | None = None,
    local_port: int = 0,
) -> Iterator[Forwarding]:
    with Forwarding(lab.spec(service, local_port), recorder, refresh) as forwarding:
        yield forwarding


def quiet_port() -> int:
    """A free port below those that systems and engines hand out by themselves."""
    return next(port for port in range(18_000, 28_000) if find_free_port(port) == port)


def test_it_leads_to_the_service_and_leaves_nothing_behind(
    service_lab: ServiceLab, web: Service, recorder: Recorder
) -> None:
    port = quiet_port()
    with (
        forwarded(service_lab, web, recorder, local_port=port) as first,
        forwarded(service_lab, web, recorder, local_port=port) as second,
    ):
        assert first.local_port == port
        assert second.local_port != port
        assert works(first.local_port)
        assert works(second.local_port)
    assert not works(first.local_port)
    first.close()


def test_a_taken_port_stays_with_whoever_has_it(
    service_lab: ServiceLab, web: Service, recorder: Recorder
) -> None:
    port = quiet_port()
    with socket.create_server(("127.0.0.1", port)) as holder:
        with forwarded(service_lab, web, recorder, local_port=port) as forwarding:
            assert forwarding.local_port != port
            assert works(forwarding.local_port)
            assert recorder.count(f"local port {port} is in use") == 1
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            holder.accept()[0].close()


def test_it_comes_back_after_the_link_was_cut(
    service_lab: ServiceLab, web: Service, recorder: Recorder
) -> None:
    with forwarded(service_lab, web, recorder) as forwarding:
        service_lab.box.black_hole()
        try:
            wait_for(
                lambda: recorder.count("connection lost, reconnecting") == 1,
                DEAD_LINK_NOTICED_AMONG_OTHERS_S,
            )
        finally:
            service_lab.box.mend()
        wait_for(lambda: recorder.count("reconnected") == 1, BACK_S)
        assert works(forwarding.local_port)


def test_it_comes_back_after_sshd_was_killed(
    service_lab: ServiceLab, web: Service, recorder: Recorder
) -> None:
    with forwarded(service_lab, web, recorder) as forwarding:
        service_lab.box.sh("pkill -9 -x sshd")
        wait_for(lambda: recorder.count("reconnected") == 1, BACK_S)
        assert works(forwarding.local_port)


@pytest.mark.long
def test_it_comes_back_after_the_service_was_lost(
    service_lab: ServiceLab, recorder: Recorder
) -> None:
    lost = service_lab.web("lost")

    def refresh() -> ForwardSpec:
        return service_lab.spec(service_lab.web("lost"))

    with forwarded(service_lab, lost, recorder, refresh) as forwarding:
        service_lab.box.sh(f"docker rm -f {lost.container}")
        wait_for(lambda: recorder.count("reconnected") == 1, BACK_S + 20)
        assert works(forwarding.local_port)
    stop_service(service_lab.remote, LAB, LAB_ID, "lost")


@pytest.mark.long
def test_it_comes_back_after_the_server_restarted_at_another_port(
    service_lab: ServiceLab, recorder: Recorder
) -> None:
    before = service_lab.box.port

    def refresh() -> ForwardSpec:
        return service_lab.spec(service_lab.web())

    with forwarded(service_lab, service_lab.web(), recorder, refresh) as forwarding:
        docker("restart", "-t", "30", service_lab.box.name)
        wait_for(lambda: greets(service_lab.box.port))
        wait_for(lambda: recorder.count("reconnected") == 1, BACK_S + 30)
        assert works(forwarding.local_port)
    # Docker gives a restarted container another port, or the test would show nothing.
    assert service_lab.box.port != before


def test_a_port_without_a_listener_is_soon_an_error(
    service_lab: ServiceLab, recorder: Recorder
) -> None:
    with pytest.raises(ConnectError, match="nothing listens on port 1 of the server") as caught:
        Forwarding(service_lab.spec(Service(name="1", port=1)), recorder).open()
    assert caught.value.hint == "labctl ssh -- ss -ltn"
    service_lab.box.sh("ss -ltn")  # the server has the program of the hint


def test_a_changed_host_key_ends_it(
    service_lab: ServiceLab, recorder: Recorder, tmp_path: Path
) -> None:
    service = service_lab.web()
    spec = service_lab.spec(service)
    text = Path(spec.config).read_text()
    other = tmp_path / "id_other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    key = " ".join(other.with_suffix(".pub").read_text().split()[:2])
    (tmp_path / "known_hosts").write_text(f"{spec.server_id} {key}\n")
    pinned = str(Path(spec.config).parent / "known_hosts")
    (tmp_path / "config").write_text(text.replace(pinned, str(tmp_path / "known_hosts")))
    wrong = msgspec.structs.replace(spec, config=str(tmp_path / "config"))
    with pytest.raises(HostKeyError):
        Forwarding(wrong, recorder).open()


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    with State(tmp_path / "state" / "labctl.db") as state:
        yield state
        for each in list_forwards(state):
            stop_forward(state, each)


def detach(lab: ServiceLab, state: State, service: Service, tmp_path: Path) -> Forward:
    spec = BackgroundForwardSpec(
        forward=lab.spec(service),
        log_path=str(tmp_path / "logs" / "forward.log"),
        request=lab.request(service.name),
    )
    return start_background_forward(spec, state)


def test_a_detached_one_is_found_outlives_a_cut_and_is_stopped(
    service_lab: ServiceLab, state: State, tmp_path: Path
) -> None:
    service = service_lab.web()
    log = tmp_path / "logs" / "forward.log"
    spec = BackgroundForwardSpec(
        forward=service_lab.spec(service),
        log_path=str(log),
        request=service_lab.request("web", "sleep", "1", port=8000),
    )
    kept = start_background_forward(spec, state)
    assert start_background_forward(spec, state) == kept
    assert list_forwards(state) == [kept]
    assert os.getsid(kept.pid) == kept.pid
    assert works(kept.local_port)
    service_lab.box.sh("pkill -9 -x sshd")
    wait_for(lambda: "reconnected" in log.read_text(), BACK_S)
    wait_for(lambda: works(kept.local_port), BACK_S)
    assert find_forwards(state, ["web"]) == [kept]
    stop_forward(state, kept)
    assert list_forwards(state) == []
    assert not works(kept.local_port)


@pytest.mark.long
def test_a_detached_one_that_slept_comes_back(
    service_lab: ServiceLab, state: State, tmp_path: Path
) -> None:
    """Suspended, and without a network, for longer than the keep-alives."""
    service = service_lab.web()
    kept = detach(service_lab, state, service, tmp_path)
    assert works(kept.local_port)
    service_lab.box.black_hole()
    try:
        with asleep(in_session(kept.pid)):
            pass
    finally:
        service_lab.box.mend()
    wait_for(lambda: works(kept.local_port), BACK_S)
    assert list_forwards(state) == [kept]


def test_a_detached_one_outlives_the_process_that_asked_for_it(
    service_lab: ServiceLab, state: State, tmp_path: Path
) -> None:
    spec = BackgroundForwardSpec(
        forward=service_lab.spec(service_lab.web()), log_path=str(tmp_path / "logs" / "f.log")
    )
    program = (
        "import sys, msgspec; from pathlib import Path; from labctl.state import State;"
        "from labctl.services.background_forwards import BackgroundForwardSpec;"
        "from labctl.services.background_forwards import start_background_forward;"
        "spec = msgspec.json.decode(sys.stdin.buffer.read(), type=BackgroundForwardSpec);"
        "start_background_forward(spec, State(Path(sys.argv[1])))"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(state.path)],
        input=msgspec.json.encode(spec),
        check=True,
        start_new_session=True,
    )
    (kept,) = list_forwards(state)
    assert works(kept.local_port)


@pytest.mark.long
def test_a_detached_one_keeps_its_token_to_itself(
    service_lab: ServiceLab, state: State, tmp_path: Path
) -> None:
    service = service_lab.ensure("jupyter")
    kept = detach(service_lab, state, service, tmp_path)
    assert kept.url.endswith(f"/lab?token={service.token}")
    assert "JupyterLab" in get(kept.url)
    assert service.token not in state.list_forwards()[0].url
    for path in (*tmp_path.rglob("*.log"), *tmp_path.rglob("labctl.db*")):
        assert service.token.encode() not in path.read_bytes()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert service.token.encode() not in cmdline.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_a_detached_one_that_cannot_connect_says_why(
    service_lab: ServiceLab, state: State, tmp_path: Path
) -> None:
    spec = service_lab.spec(service_lab.web())
    Path(spec.config).parent.joinpath("known_hosts").write_text("")
    try:
        with pytest.raises(HostKeyError):
            start_background_forward(
                BackgroundForwardSpec(forward=spec, log_path=str(tmp_path / "f.log")), state
            )
    finally:
        service_lab.connections.write(service_lab.server)
    assert list_forwards(state) == []


@pytest.mark.long
def test_the_guide_shows_what_labctl_prints_on_a_lab_machine(
    service_lab: ServiceLab, tmp_path: Path
) -> None:
    service_lab.ensure("jupyter")  # so the image with JupyterLab is there, as after a first start
    session = make_served_session(tmp_path, service_lab.box.endpoint(), service_lab.image)
    try:
        assert "birds is ready" in session.run("labctl up --yes")
        assert "\n".join(replay(GUIDE, "machine", session)) == ""
    finally:
        session.run("labctl down --yes --discard")

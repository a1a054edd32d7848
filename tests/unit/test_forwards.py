"""Ports, addresses, records and knocking, without a server."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from labctl.errors import ConnectError, HostKeyError, LabError, NotFoundError
from labctl.errors.replies import as_reply
from labctl.events import Event, Note, SilentReporter
from labctl.model import Endpoint, Forward, Offer, Server, Service
from labctl.services import background_forwards, lab_services, services
from labctl.services.background_forwards import (
    BackgroundForwardSpec,
    find_forwards,
    is_ours,
    list_forwards,
    stop_forward,
)
from labctl.services.port_forward import (
    EndedForwardError,
    Forwarding,
    ForwardSpec,
    Refresh,
    SshProcess,
    _PortTakenError,
    build_url,
    find_free_port,
    probe_port,
)
from labctl.services.services import usual_port
from labctl.state import State
from labctl.wire.codec import encode
from labctl.wire.services import BackgroundForwardReply

JUPYTER = Service(name="jupyter", port=40001, token="s3cret", path="/lab")


def forward(pid: int, forward_id: str = "f1", service: str = "web") -> Forward:
    return Forward(
        id=forward_id,
        server_id="box-1",
        service=service,
        local_port=8000,
        remote_port=40000,
        url="http://127.0.0.1:8000/",
        pid=pid,
    )


def make_server(name: str) -> Server:
    return Server(
        id=name, provider="local", lab="digits", lab_id="l1", alias="digits", state="running",
        endpoint=Endpoint(host="h"), offer=Offer(provider="local", type="container"),
        created_at=1.0,
    )  # fmt: skip


@contextmanager
def listener(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def once() -> None:
            connection, _ = server.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=once)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_the_address_has_the_token_only_where_it_is_wanted() -> None:
    assert build_url(JUPYTER, 8888) == "http://127.0.0.1:8888/lab?token=s3cret"
    assert build_url(JUPYTER, 8888, token=False) == "http://127.0.0.1:8888/lab"
    assert build_url(Service(name="web", port=1), 8000) == "http://127.0.0.1:8000/"


def test_known_services_are_expected_at_their_usual_port() -> None:
    assert usual_port("jupyter", JUPYTER) == 8888
    assert usual_port("tensorboard", JUPYTER) == 6006
    assert usual_port("web", JUPYTER) == 40001


def test_a_free_port_is_taken_as_wanted_and_another_one_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        other = find_free_port(taken)
        assert other not in (0, taken)
    assert find_free_port(taken) == taken


def test_who_answers_or_listens_in_silence_is_there() -> None:
    heard: list[bytes] = []
    with listener(lambda wire: wire.sendall(b"x")) as port:
        assert probe_port(port, "/") == "answering"
    with listener(lambda wire: heard.append(wire.recv(100) + wire.recv(1))) as port:
        assert probe_port(port, "/lab", timeout_s=0.2) == "answering"
    assert heard[0].startswith(b"GET /lab HTTP/1.0\r\n")


def test_who_hangs_up_or_is_absent_is_not_there() -> None:
    with listener(lambda _: None) as port:
        assert probe_port(port, "/") == "refused"
    assert probe_port(find_free_port(0), "/") == "closed"


def test_without_ssh_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    spec = ForwardSpec(
        config="/nowhere", server_id="box-1", endpoint=Endpoint(host="h"), service=JUPYTER
    )
    with pytest.raises(NotFoundError, match="which is not installed on this machine") as caught:
        Forwarding(spec).open()
    assert "openssh-client" in caught.value.hint


class Recorded(SilentReporter):
    """Keeps the texts that a forward reports."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Note):
            self.texts.append(event.text)


def test_another_local_port_is_named_once_the_service_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reporter = Recorded()
    endpoint = Endpoint(host="h")
    ends: list[Exception | None] = [ConnectError("refused"), _PortTakenError("taken"), None]

    def connect(forwarding: Forwarding) -> None:
        if end := ends.pop(0):
            raise end

    monkeypatch.setattr(Forwarding, "_connect", connect)
    monkeypatch.setattr(Forwarding, "_watch", lambda forwarding: None)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        spec = ForwardSpec(
            config="/nowhere",
            server_id="box-1",
            endpoint=endpoint,
            service=JUPYTER,
            local_port=taken,
        )
        with pytest.raises(ConnectError):
            Forwarding(spec, reporter).open()
        assert reporter.texts == []
        with Forwarding(spec, reporter) as opened:
            assert reporter.texts == [f"local port {taken} is in use; jupyter is at {opened.url}"]


def test_while_the_lab_has_no_server_the_lost_one_keeps_no_alias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []
    refreshes: list[Refresh] = []

    def write(server: Server) -> str:
        written.append(server.id)
        return f"/{server.id}/config"

    context = SimpleNamespace(
        config=SimpleNamespace(name="digits"),
        connections=SimpleNamespace(write=write),
        reporter=SilentReporter(),
    )
    lost, new = make_server("box-1"), make_server("box-2")
    found: list[Server | None] = [None, new]

    def keep(spec: ForwardSpec, reporter: object, refresh: Refresh) -> SimpleNamespace:
        refreshes.append(refresh)
        return SimpleNamespace(open=lambda: None)

    monkeypatch.setattr(lab_services, "adopt", lambda context: found.pop(0))
    monkeypatch.setattr(lab_services, "Forwarding", keep)
    lab_services.open_forward(context, lost, JUPYTER, 0, lambda now: JUPYTER)  # type: ignore[arg-type]
    with pytest.raises(ConnectError, match="digits has no server now"):
        refreshes[0]()
    assert refreshes[0]().server_id == "box-2"
    assert written == ["box-1", "box-2"]


def test_after_a_recovery_it_leads_to_the_new_server(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ForwardSpec(
        config="/old", server_id="box-1", endpoint=Endpoint(host="old"), service=JUPYTER
    )
    new = msgspec.structs.replace(
        old, config="/new", server_id="box-2", endpoint=Endpoint(host="new")
    )
    targets: list[str] = []

    def connect(forwarding: Forwarding) -> None:
        targets.append(forwarding._spec.server_id)
        if forwarding._spec.server_id == "box-1" and len(targets) > 1:
            raise ConnectError("the server is gone")

    monkeypatch.setattr(Forwarding, "_connect", connect)
    monkeypatch.setattr(Forwarding, "_watch", lambda forwarding: None)
    with Forwarding(old, refresh=lambda: new) as opened:
        port = opened.local_port
        assert opened._reconnect(ask=False)
        assert opened.local_port == port
    assert targets == ["box-1", "box-1", "box-2"]


def make_background(
    tmp_path: Path, status: str, code: int, service: Service = JUPYTER
) -> BackgroundForwardSpec:
    """A background forward to box-1, where a shell stands for labctl.

    It prints `status`, and opens the forward with exit code `code`.
    """
    forward = ForwardSpec(
        config="/old", server_id="box-1", endpoint=Endpoint(host="old"), service=service
    )
    script = f'echo "$@" > {tmp_path / "reopened"}; exit {code}'
    return BackgroundForwardSpec(
        forward=forward,
        log_path=str(tmp_path / "log"),
        refresh_argv=("echo", status),
        reopen_argv=("sh", "-c", script, "labctl", "forward"),
    )


def test_a_background_forward_opens_again_at_a_server_that_replaced_its_own(
    tmp_path: Path,
) -> None:
    spec = make_background(tmp_path, '{"version": 1, "server": {"id": "box-2", "lab": "l"}}', 0)
    with pytest.raises(EndedForwardError, match="box-2"):
        background_forwards._make_refresh(spec, lambda: 8123)()
    assert (tmp_path / "reopened").read_text() == "forward --port 8123\n"


@pytest.mark.parametrize("status", ['{"server": {"id": "box-1"}}', '{"server": null}'])
def test_a_background_forward_waits_for_its_own_server(tmp_path: Path, status: str) -> None:
    spec = make_background(tmp_path, status, 0)
    assert background_forwards._make_refresh(spec, lambda: 8123)() == spec.forward
    assert not (tmp_path / "reopened").exists()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ('{"server": {"id": "box-2"}}', "cannot open the forward again"),
        ("a warning", "cannot read the lab's status"),
    ],
)
def test_a_background_forward_that_cannot_open_again_goes_on_trying(
    tmp_path: Path, status: str, message: str
) -> None:
    """A ConnectError is tried again; any other error would end the thread that watches."""
    spec = make_background(tmp_path, status, 75)
    with pytest.raises(ConnectError, match=message):
        background_forwards._make_refresh(spec, lambda: 8123)()


SERVED = Service(name="serve-model", port=40002)


def test_a_model_that_is_not_served_on_the_new_server_ends_its_background_forward(
    tmp_path: Path,
) -> None:
    status = '{"server": {"id": "box-2"}}'
    spec = make_background(tmp_path, status, 4, SERVED)
    with pytest.raises(EndedForwardError, match="does not run on the new server box-2; labctl ser"):
        background_forwards._make_refresh(spec, lambda: 8000)()
    assert (tmp_path / "reopened").read_text() == "forward --port 8000\n"
    spec = make_background(tmp_path, status, 0, SERVED)
    with pytest.raises(EndedForwardError, match="leads to the new server box-2"):
        background_forwards._make_refresh(spec, lambda: 8000)()
    # labctl starts other services there: such a failure passes.
    with pytest.raises(NotFoundError):
        background_forwards._make_refresh(make_background(tmp_path, status, 4), lambda: 8000)()


def test_what_labctl_serve_starts_is_found_and_never_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(name="lab", submits_jobs=False, services={})
    context = SimpleNamespace(config=config, lab_id="l1", open_agent=lambda server: None)
    server = make_server("box-2")
    running = [SERVED, Service(name="tensorboard", port=40003)]
    monkeypatch.setattr(services, "list_services", lambda *words: running)
    wanted = lab_services.build_request(context, server, "serve-model")  # type: ignore[arg-type]
    assert lab_services.ensure(context, server, wanted) == SERVED  # type: ignore[arg-type]
    running.pop(0)
    with pytest.raises(NotFoundError, match="the language model is not running on the server"):
        lab_services.ensure(context, server, wanted)  # type: ignore[arg-type]
    ports = [usual_port(name, SERVED) for name in ("serve", "serve-model", "serve-11434")]
    assert ports == [8000, 8000, 11434]


RIVAL = """\
#!{python}
import http.server, pathlib, sys
class Asked(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        pathlib.Path({asked!r}).touch()
        self.send_error(404)
with http.server.HTTPServer(("127.0.0.1", {port}), Asked) as server:
    server.timeout = 1.0
    server.handle_request()
sys.exit("ssh: connect to host h port 22: Connection refused")
"""


def test_another_program_on_the_port_is_not_the_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that listens there while ssh is connecting, as the forward of another lab might."""
    port = find_free_port(0)
    ssh = tmp_path / "ssh"
    ssh.write_text(RIVAL.format(python=sys.executable, port=port, asked=str(tmp_path / "asked")))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = ForwardSpec(
        config="/nowhere",
        server_id="box-1",
        endpoint=Endpoint(host="h"),
        service=JUPYTER,
        local_port=port,
    )
    with pytest.raises(ConnectError):
        Forwarding(spec).open()
    assert not (tmp_path / "asked").exists()


def test_an_ssh_that_another_thread_has_ended_listens_nowhere(tmp_path: Path) -> None:
    """As with Ctrl-C during a reconnection."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 60\n")
    ssh.chmod(0o755)
    process = SshProcess([str(ssh)])
    process.end()
    assert not process.is_listening(0.1)
    assert process.read_stderr() == ""


def test_ctrl_c_leaves_ssh_to_labctl_and_a_hangup_ends_it(tmp_path: Path) -> None:
    """Otherwise a busy machine reports a lost connection between Ctrl-C and the end."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho\nexec sleep 60\n")
    ssh.chmod(0o755)
    for end in (SshProcess.end, lambda process: process.process.send_signal(signal.SIGHUP)):
        process = SshProcess([str(ssh)])
        assert process.is_listening(30.0)
        process.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.process.wait(0.5)
        end(process)
        assert process.process.wait(30) < 0
        process.end()


def test_a_record_whose_pid_belongs_to_another_process_is_dropped_and_that_one_spared(
    tmp_path: Path,
) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        with State(tmp_path / "labctl.db") as state:
            state.save_forward(forward(stranger.pid))
            assert not is_ours(forward(stranger.pid))
            stop_forward(state, forward(stranger.pid))
            assert state.list_forwards() == []
            state.save_forward(forward(os.getpid(), "f2"))
            assert list_forwards(state) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_stopping_what_is_not_there_is_said(tmp_path: Path) -> None:
    with State(tmp_path / "labctl.db") as state:
        with pytest.raises(NotFoundError, match="there is no forward web"):
            find_forwards(state, ["web"])
        assert find_forwards(state) == []


@contextmanager
def hold_forward(forward_id: str) -> Iterator[int]:
    """The pid of a process whose command line is that of one that holds this forward."""
    words = [f"python -m labctl.services.background_forwards {forward_id}", "-c", "echo; read line"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, executable="/bin/sh", stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the kernel shows no command line during the exec
        try:
            yield process.pid
        finally:
            process.kill()


def test_forwards_are_found_by_name_in_a_lab_and_by_id_anywhere(tmp_path: Path) -> None:
    with (
        hold_forward("f1") as our_pid,
        hold_forward("f2") as other_pid,
        State(tmp_path / "labctl.db") as state,
    ):
        ours = forward(our_pid, "f1")
        other = msgspec.structs.replace(forward(other_pid, "f2"), server_id="box-2")
        state.save_forward(ours)
        state.save_forward(other)
        assert find_forwards(state) == [ours, other]
        assert find_forwards(state, ["web"]) == [ours, other]
        assert find_forwards(state, [], ["box-1"]) == [ours]
        assert find_forwards(state, ["web", "f1"], ["box-1"]) == [ours]
        assert find_forwards(state, ["f2"], ["box-1"]) == [other]
        with pytest.raises(NotFoundError) as raised:
            find_forwards(state, ["web"], ["box-3"])
        assert raised.value.why == "only other labs have one"


def test_a_forward_of_an_earlier_version_is_still_ours() -> None:
    # Its output shows that it runs: the kernel shows no command line during the exec.
    words = ["python -m labctl.services.forwards 0123abcd", "-c", "echo; read line"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, executable="/bin/sh", stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert is_ours(forward(process.pid, "0123abcd"))
            assert not is_ours(forward(process.pid, "0123abce"))
        finally:
            process.kill()


def test_the_process_that_holds_a_forward_replies_with_its_port() -> None:
    reply = BackgroundForwardReply(pid=7, local_port=8000)
    line = encode(reply).encode() + b"\n"
    assert background_forwards._read_reply(io.BytesIO(line)) == reply


def test_an_error_of_the_process_that_holds_a_forward_is_raised_here() -> None:
    sent = HostKeyError("the key changed", why="another machine answers", hint="labctl up")
    with pytest.raises(HostKeyError) as caught:
        background_forwards._read_reply(io.BytesIO(encode(as_reply(sent)).encode() + b"\n"))
    assert (caught.value.what, caught.value.why, caught.value.hint) == (
        "the key changed",
        "another machine answers",
        "labctl up",
    )


@pytest.mark.parametrize("line", [b"", b"Traceback (most recent call last):\n", b"{}\n"])
def test_a_process_that_does_not_reply_is_reported(line: bytes) -> None:
    with pytest.raises(LabError, match="ended at once"):
        background_forwards._read_reply(io.BytesIO(line))

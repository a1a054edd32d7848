"""What goes wrong on the way to a server, on real links, sshds and masters."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from calibration import dead_link_limit_s
from sshd_container import Sshd, docker, greets, wait_for

from labctl.commands import ssh
from labctl.errors import ConnectError, HostKeyError, LinkLostError
from labctl.model import Endpoint, Server
from labctl.servers.connections import Connections
from labctl.transports import Body, Transport
from labctl.transports.fabric import FabricTransport
from labctl.transports.openssh import OpenSshTransport

pytest_plugins = ["sshd_fixtures"]
pytestmark = pytest.mark.engine

Make = Callable[[Endpoint], Transport]


KINDS = ("openssh", "openssh without a master", "fabric")


def connect(kind: str, sshd: Sshd, connections: Connections) -> Transport:
    made: Transport = connections.connect(sshd.endpoint())
    assert isinstance(made, OpenSshTransport)
    if kind == "fabric":
        return FabricTransport(sshd.endpoint())
    if kind == "openssh without a master":
        config = made.config_path
        return OpenSshTransport(config, config.parent.name, sshd.endpoint(), master=False)
    return made


@pytest.fixture(params=KINDS)
def transport(
    request: pytest.FixtureRequest, sshd: Sshd, connections: Connections
) -> Iterator[Transport]:
    made = connect(request.param, sshd, connections)
    yield made
    made.close()


@pytest.fixture
def every_kind(sshd: Sshd, tmp_path: Path) -> Iterator[list[Transport]]:
    """Two transports of each kind: for a command, and for much that is sent."""
    made = [
        connect(kind, sshd, Connections(tmp_path / f"{use}-{number}", None))
        for use in ("command", "send")
        for number, kind in enumerate(KINDS)
    ]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def server(sshd: Sshd, connections: Connections) -> Iterator[Server]:
    yield sshd.server()
    connections.close(sshd.server())


def opened(connections: Connections, server: Server) -> OpenSshTransport:
    transport = connections.open(server)
    assert isinstance(transport, OpenSshTransport)
    return transport


def master_pid(transport: OpenSshTransport) -> int:
    argv = ssh.build_control_argv(
        str(transport.config_path),
        transport.config_path.parent.name,
        "check",
        transport.control_path,
    )
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stderr
    return int(said.partition("pid=")[2].partition(")")[0])


class Witness:
    """One transport with a command that says a word, and when it noticed that the link is dead."""

    def __init__(self, transport: Transport, line: str, stdin: Body = b"") -> None:
        self.transport = transport
        self.line, self.stdin = line, stdin
        self.began = threading.Event()

    def watch(self) -> tuple[float, LinkLostError]:
        with pytest.raises(LinkLostError) as caught:
            self.transport.stream(self.line, stdin=self.stdin, on_stdout=lambda _: self.began.set())
        return time.monotonic(), caught.value


def without_end() -> Iterator[bytes]:
    return itertools.repeat(bytes(1 << 20))


@pytest.mark.timed
def test_a_black_hole_is_noticed_by_every_kind_of_connection(
    every_kind: list[Transport], sshd: Sshd
) -> None:
    """While a command runs, and while much is sent: all of them lose the same link at once."""
    half = len(KINDS)
    witnesses = [Witness(one, "echo on; sleep 60") for one in every_kind[:half]]
    line = "echo on; cat >/dev/null"
    witnesses += [Witness(one, line, without_end) for one in every_kind[half:]]
    limit_s = dead_link_limit_s()
    with ThreadPoolExecutor(len(witnesses)) as pool:
        noticed = [pool.submit(one.watch) for one in witnesses]
        try:
            assert all(one.began.wait(60) for one in witnesses)
            sshd.black_hole()
            cut = time.monotonic()
            for future in noticed:
                at, error = future.result()
                assert at - cut < limit_s
                assert "was lost" in error.what
        finally:
            sshd.mend()
    for one in every_kind:
        assert one.run("echo back").stdout == "back\n"


def test_sessions_killed_with_sshd_are_told_and_what_runs_apart_goes_on(
    transport: Transport, sshd: Sshd
) -> None:
    """A run is no child of the session: it does not notice that sshd is restarted."""
    transport.run("rm -f /tmp/go /tmp/done; mkfifo -m 666 /tmp/go")
    apart = "setsid sh -c 'cat /tmp/go >/tmp/done' </dev/null >/dev/null 2>&1 &"

    def seen(_: bytes) -> None:
        sshd.stop_sshd()

    try:
        with pytest.raises(LinkLostError):
            transport.stream(f"{apart} echo on; sleep 60", on_stdout=seen)
    finally:
        sshd.start_sshd()
    transport.run("echo survived >/tmp/go; until [ -s /tmp/done ]; do sleep 0.05; done")
    assert transport.run("cat /tmp/done; rm /tmp/go /tmp/done").stdout == "survived\n"


def test_a_killed_master_is_replaced(sshd: Sshd, connections: Connections, server: Server) -> None:
    transport = opened(connections, server)
    transport.run("true")
    first = master_pid(transport)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{first}/cmdline").exists() or not alive(first))
    assert Path(transport.control_path).exists(), "the dead master's socket should still be there"
    assert transport.run("echo again").stdout == "again\n"
    assert master_pid(transport) != first


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_master_that_dies_during_a_command(
    sshd: Sshd, connections: Connections, server: Server
) -> None:
    transport = opened(connections, server)

    def seen(_: bytes) -> None:
        os.kill(master_pid(transport), signal.SIGKILL)

    with pytest.raises(LinkLostError):
        transport.stream("echo on; sleep 60", on_stdout=seen)


def test_a_changed_host_key_is_a_stop(
    start_sshd: Callable[..., Sshd], connections: Connections
) -> None:
    box = start_sshd()
    server = box.server()
    opened(connections, server).run("true")
    connections.close(server)
    box.stop_sshd()
    box.new_host_key()
    box.start_sshd()
    with pytest.raises(HostKeyError) as caught:
        connections.wait_for_ssh(server, 60)
    assert caught.value.exit_code == 3


@pytest.mark.long
def test_a_reused_address_is_a_stop_not_a_login(
    start_sshd: Callable[..., Sshd], connections: Connections
) -> None:
    """Another server at the same address: the old one's name stops, the new one's works."""
    old = start_sshd()
    server, port = old.server("box-old", "old"), old.port
    opened(connections, server).run("true")
    docker("rm", "-f", old.name)
    new = start_sshd("-p", f"127.0.0.1:{port}:2222")
    new.sh("/usr/sbin/sshd -p 2222")
    wait_for(lambda: greets(port))
    successor = new.server("box-new", "new")
    successor = msgspec.structs.replace(
        successor, endpoint=msgspec.structs.replace(successor.endpoint, port=port)
    )
    with pytest.raises(HostKeyError):
        opened(connections, server).run("true")
    assert opened(connections, successor).run("echo new").stdout == "new\n"
    connections.close(successor)


def test_wait_for_ssh_outlasts_a_boot(sshd: Sshd, connections: Connections, server: Server) -> None:
    sshd.stop_sshd()
    booted = threading.Timer(1.5, sshd.start_sshd)
    booted.start()
    try:
        assert connections.wait_for_ssh(server, 30).run("echo up").stdout == "up\n"
    finally:
        booted.join()


def test_wait_for_ssh_ends_with_its_deadline(
    sshd: Sshd, connections: Connections, server: Server
) -> None:
    sshd.stop_sshd()
    begun = time.monotonic()
    try:
        with pytest.raises(ConnectError, match="could not log in to digits within 2 s"):
            connections.wait_for_ssh(server, 2)
    finally:
        sshd.start_sshd()
    assert time.monotonic() - begun < 60


def test_a_whole_class_connects_at_once(sshd: Sshd, tmp_path: Path) -> None:
    """sshd lets only four log in at a time; all twelve get in."""
    sshd.stop_sshd()
    sshd.start_sshd("MaxStartups=4:100:4")

    def student(number: int) -> str:
        connections = Connections(tmp_path / str(number), None)
        server = sshd.server(f"box-{number}")
        try:
            return connections.wait_for_ssh(server, 60).run("echo in").stdout
        finally:
            connections.close(server)

    try:
        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(student, range(12))) == ["in\n"] * 12
    finally:
        sshd.stop_sshd()
        sshd.start_sshd()


def forward(connections: Connections, server: Server, local: int) -> subprocess.Popen[str]:
    argv = ssh.forward_argv(str(connections.write(server)), server.id, [(local, 22)])
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.timed
def test_a_forward_stands_apart_from_the_master_and_ends_with_its_link(
    sshd: Sshd, connections: Connections, server: Server
) -> None:
    transport = opened(connections, server)
    transport.run("true")
    port = free_port()
    limit_s = dead_link_limit_s()
    with forward(connections, server, port) as process:
        wait_for(lambda: greets(port))
        transport.close()
        assert greets(port)
        sshd.black_hole()
        try:
            assert process.wait(limit_s) == 255
        finally:
            sshd.mend()
            process.kill()


def test_a_taken_port_ends_the_forward_and_nothing_else(
    sshd: Sshd, connections: Connections, server: Server
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with forward(connections, server, port) as process:
            assert process.wait(120) == 255
            assert process.stderr is not None
            assert f"{port}: Address already in use" in process.stderr.read()
        taken.settimeout(5)
        with socket.create_connection(("127.0.0.1", port)):
            taken.accept()[0].close()


def test_people_use_the_alias_with_a_master_of_their_own(
    sshd: Sshd, connections: Connections, server: Server, tmp_path: Path
) -> None:
    transport = opened(connections, server)
    mine = transport.run("echo $SSH_CONNECTION").stdout
    argv = ["ssh", "-F", str(tmp_path / "home" / ".ssh" / "config"), "digits"]

    def theirs() -> str:
        return subprocess.run(
            [*argv, "echo $SSH_CONNECTION"], capture_output=True, text=True, check=True
        ).stdout

    try:
        assert theirs() == theirs() != mine
    finally:
        subprocess.run([*argv[:3], "-O", "exit", "digits"], capture_output=True, check=True)


def test_people_get_in_after_a_reboot_has_emptied_tmp(sshd: Sshd, server: Server) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        known_hosts, config = Path(folder) / "known_hosts", Path(folder) / "config"
        known_hosts.write_text(ssh.known_hosts_line(server.id, server.endpoint.host_key))
        text = ssh.server_config(
            server.id, server.alias, server.endpoint,
            known_hosts=str(known_hosts), runtime_dir=f"{folder}/gone",
        )  # fmt: skip
        config.write_text(text)
        argv = ["ssh", "-F", str(config), "-n", "digits"]
        subprocess.run([*argv, "true"], check=True)
        assert (Path(folder) / "gone").stat().st_mode & 0o777 == 0o700
        subprocess.run([*argv[:3], "-O", "exit", "digits"], capture_output=True, check=True)


def test_a_key_settled_once_is_asked_for_once(sshd: Sshd, connections: Connections) -> None:
    from labctl.errors import PolicyError
    from labctl.events import Question, SilentReporter
    from labctl.servers.host_keys import fingerprint

    asked: list[Question] = []

    class Person(SilentReporter):
        def __init__(self, answer: bool) -> None:
            self.answer = answer

        def confirm(self, decision: Question) -> bool:
            asked.append(decision)
            return self.answer

    unknown = sshd.endpoint(host_key="")
    with pytest.raises(PolicyError, match="not confirmed"):
        connections.settle_host_key(unknown, Person(False))
    settled = connections.settle_host_key(unknown, Person(True))
    assert settled.host_key == sshd.host_key
    assert fingerprint(sshd.host_key) in asked[1].detail
    assert connections.settle_host_key(unknown, Person(False)) == settled
    assert len(asked) == 2


def test_a_key_that_the_user_knows_is_not_asked_for(
    sshd: Sshd, connections: Connections, tmp_path: Path
) -> None:
    from labctl.events import SilentReporter

    folder = tmp_path / "home" / ".ssh"
    folder.mkdir(parents=True)
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n")
    subprocess.run(["ssh-keygen", "-H", "-f", str(folder / "known_hosts")], check=True)
    settled = connections.settle_host_key(sshd.endpoint(host_key=""), SilentReporter())
    assert settled.host_key == sshd.host_key

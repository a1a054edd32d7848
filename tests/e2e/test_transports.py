"""One contract, kept by every transport; the real ones against a real sshd."""

from __future__ import annotations

import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from sshd_container import Sshd, wait_for

from labctl.errors import (
    AuthenticationError,
    BusyError,
    CommandError,
    ConnectError,
    ConnectionRefusedByServerError,
    DnsError,
    HostKeyError,
    LinkLostError,
    NotFoundError,
    UsageError,
)
from labctl.events import SilentReporter
from labctl.model import Endpoint
from labctl.parallel import run_parts
from labctl.servers.connections import Connections
from labctl.servers.host_keys import ensure_key_pair
from labctl.shell import command
from labctl.sync.single_file import download_file, upload_file
from labctl.transports import Result, Transport
from labctl.transports.fabric import FabricTransport
from labctl.transports.fabric_login import fetch_host_key
from labctl.transports.fake import FakeTransport
from labctl.transports.openssh import OpenSshTransport

pytest_plugins = ["sshd_fixtures"]
pytestmark = pytest.mark.engine

Make = Callable[[Endpoint], Transport]
REAL = ("openssh", "openssh without a master", "fabric")
AWKWARD = command("printf", "%s", "it's $HOME `id` \\ \" !! \n é")


def scripted() -> FakeTransport:
    fake = FakeTransport()
    fake.reply("^echo out", Result(code=3, stdout="out\n", stderr="err\n"))
    fake.reply("^exit 255", code=255)
    fake.reply("^cat", lambda line, stdin: Result(code=0, stdout=stdin.decode()))
    fake.reply("^printf", "it's $HOME `id` \\ \" !! \n é")
    fake.reply("^sleep", BusyError("too slow"))
    return fake


@pytest.fixture
def make(request: pytest.FixtureRequest, connections: Connections) -> Iterator[Make]:
    made: list[Transport] = []

    def one(endpoint: Endpoint) -> Transport:
        if request.param == "fake":
            made.append(scripted())
        elif request.param == "fabric":
            made.append(FabricTransport(endpoint))
        elif request.param == "openssh":
            made.append(connections.connect(endpoint))
            assert isinstance(made[-1], OpenSshTransport)
        else:
            config = Path(str(connections.connect(endpoint).config_path))
            made.append(OpenSshTransport(config, config.parent.name, endpoint, master=False))
        return made[-1]

    yield one
    for transport in made:
        transport.close()


every_transport = pytest.mark.parametrize("make", [*REAL, "fake"], indirect=True)
real_transports = pytest.mark.parametrize("make", REAL, indirect=True)


@pytest.fixture
def transport(make: Make, sshd: Sshd) -> Transport:
    return make(sshd.endpoint())


@every_transport
def test_run_gives_code_and_both_streams(transport: Transport) -> None:
    result = transport.run("echo out; echo err >&2; exit 3", check=False)
    assert result == Result(code=3, stdout="out\n", stderr="err\n")


@every_transport
def test_a_failing_command_is_an_error_with_its_last_words(transport: Transport) -> None:
    with pytest.raises(CommandError) as caught:
        transport.run("echo out; echo err >&2; exit 3")
    assert (caught.value.code, caught.value.why) == (3, "err")


@every_transport
def test_the_commands_own_255_is_not_a_lost_link(transport: Transport) -> None:
    assert transport.run("exit 255", check=False) == Result(code=255)


@every_transport
def test_stdin_arrives_and_ends(transport: Transport) -> None:
    assert transport.run("cat", stdin=b"one\ntwo").stdout == "one\ntwo"
    assert transport.run("cat").stdout == ""


@every_transport
def test_an_error_of_the_input_ends_the_command(transport: Transport) -> None:
    def broken() -> Iterator[bytes]:
        yield b"one"
        raise UsageError("no more")

    with pytest.raises(UsageError, match="no more"):
        transport.run("cat", stdin=broken)
    assert transport.run("cat", stdin=b"two").stdout == "two"


@every_transport
def test_words_arrive_as_they_are(transport: Transport) -> None:
    assert transport.run(AWKWARD).stdout == AWKWARD.words[2]


@every_transport
def test_a_command_that_takes_too_long_is_given_up(transport: Transport) -> None:
    with pytest.raises(BusyError) as caught:
        transport.run("sleep 60", timeout_s=0.5)
    assert not isinstance(caught.value, ConnectError)
    with pytest.raises(BusyError):
        transport.stream("sleep 60", on_stdout=lambda block: None, timeout_s=0.5)


@real_transports
def test_a_command_ends_with_the_part_that_waits_for_it(transport: Transport) -> None:
    transport.run("true")
    begun = threading.Event()

    def work() -> None:
        transport.stream("echo begun; exec sleep 60", on_stdout=lambda _: begun.set())

    def fail() -> None:
        assert begun.wait(30)
        raise UsageError("stop")

    started = time.monotonic()
    with pytest.raises(UsageError, match="stop"):
        run_parts({"work": work, "fail": fail})
    assert time.monotonic() - started < 30
    assert transport.run("echo again").stdout == "again\n"


@every_transport
def test_stream_hands_over_output_and_returns_the_code(transport: Transport) -> None:
    out: list[bytes] = []
    err: list[bytes] = []
    code = transport.stream(
        "echo out; echo err >&2; exit 3", on_stdout=out.append, on_stderr=err.append
    )
    assert (code, b"".join(out), b"".join(err)) == (3, b"out\n", b"err\n")


@real_transports
def test_stream_hands_over_before_the_command_ends(transport: Transport, sshd: Sshd) -> None:
    """The command waits for a file that is made only when its first word has arrived."""
    sshd.sh("rm -f /tmp/seen")
    out: list[bytes] = []

    def seen(chunk: bytes) -> None:
        out.append(chunk)
        sshd.sh("touch /tmp/seen")

    line = "echo first; until [ -e /tmp/seen ]; do sleep 0.05; done; echo last"
    assert transport.stream(line, on_stdout=seen) == 0
    assert b"".join(out) == b"first\nlast\n"
    assert len(out) == 2


@real_transports
def test_much_goes_both_ways_at_once(transport: Transport) -> None:
    sent = bytes(range(256)) * 20_000
    got: list[bytes] = []
    assert transport.stream("tee /dev/stderr", stdin=sent, on_stdout=got.append) == 0
    assert b"".join(got) == sent


@real_transports
def test_a_command_need_not_read_its_input(transport: Transport) -> None:
    assert transport.run("exec 0<&-; echo done", stdin=b"x" * 5_000_000).stdout == "done\n"


@real_transports
def test_undecodable_output_is_replaced(transport: Transport) -> None:
    assert transport.run("printf 'a\\377b'").stdout == "a�b"


@real_transports
def test_commands_have_no_tty(transport: Transport) -> None:
    assert transport.run("test -t 0 || test -t 1 || echo none").stdout == "none\n"


@real_transports
def test_a_command_killed_with_its_shell_is_unknown_not_failed(transport: Transport) -> None:
    with pytest.raises(LinkLostError):
        transport.run("kill -9 $$")


@real_transports
def test_more_commands_at_once_than_sshd_has_sessions(transport: Transport) -> None:
    """sshd allows ten a connection. Each of the twelve waits until nine have begun."""
    line = "mktemp /tmp/at-once-XXXXXX >/dev/null; until [ $(ls /tmp/at-once-* | wc -l) -ge 8 ]; "
    line += "do sleep 0.05; done; echo done"
    with ThreadPoolExecutor(12) as pool:
        done = list(pool.map(lambda _: transport.run(line).stdout, range(12)))
    transport.run("rm -f /tmp/at-once-*")
    assert done == ["done\n"] * 12


@real_transports
@pytest.mark.parametrize("user", ["fishy", "cshy", "noisy"])
def test_odd_login_shells(make: Make, sshd: Sshd, user: str) -> None:
    transport = make(sshd.endpoint(user))
    assert transport.run(AWKWARD).stdout == AWKWARD.words[2]
    result = transport.run("x=1; for i in 1 2; do echo $((x + i)); done; exit 255", check=False)
    assert (result.code, result.stdout, result.stderr) == (255, "2\n3\n", "")
    assert ("Welcome" in result.noise) == (user == "noisy")


@real_transports
def test_what_cannot_be_reached_is_told_apart(make: Make, sshd: Sshd) -> None:
    here = sshd.endpoint()
    with pytest.raises(DnsError) as nameless:
        make(msgspec.structs.replace(here, host="nosuch.invalid")).run("true")
    with pytest.raises(ConnectionRefusedByServerError) as closed:
        make(msgspec.structs.replace(here, port=1)).run("true")
    assert "nosuch.invalid" in nameless.value.what
    assert "port 1" in closed.value.what
    assert nameless.value.hint
    assert closed.value.hint
    assert nameless.value.exit_code == closed.value.exit_code == 75


@real_transports
def test_a_machine_that_never_greets_is_given_up(make: Make, sshd: Sshd) -> None:
    sshd.black_hole()
    try:
        with pytest.raises(ConnectError) as caught:
            make(sshd.endpoint()).run("true")
    finally:
        sshd.mend()
    assert not isinstance(caught.value, (DnsError, ConnectionRefusedByServerError, LinkLostError))


@real_transports
def test_a_key_that_is_not_accepted(make: Make, sshd: Sshd, tmp_path: Path) -> None:
    ensure_key_pair(tmp_path / "other")
    with pytest.raises(AuthenticationError) as caught:
        make(sshd.endpoint(identity=str(tmp_path / "other"))).run("true")
    assert str(tmp_path / "other") in caught.value.what


@real_transports
def test_only_the_pinned_host_key_is_believed(make: Make, sshd: Sshd, tmp_path: Path) -> None:
    stranger = ensure_key_pair(tmp_path / "other")
    with pytest.raises(HostKeyError) as changed:
        make(sshd.endpoint(host_key=stranger)).run("true")
    with pytest.raises(HostKeyError) as unknown:
        make(sshd.endpoint(host_key="")).run("true")
    assert changed.value.exit_code == 3
    assert "not the one that was pinned" in changed.value.what
    assert "no host key is pinned" in unknown.value.what


@pytest.fixture(scope="module")
def sshd_of_all_kinds(sshd: Sshd) -> Sshd:
    """The server, with a host key of each kind."""
    sshd.sh("ssh-keygen -q -A")
    sshd.stop_sshd()
    sshd.start_sshd()
    return sshd


@pytest.mark.parametrize("pinned", ["ecdsa", "rsa"])
@real_transports
def test_other_kinds_of_host_keys(make: Make, sshd_of_all_kinds: Sshd, pinned: str) -> None:
    sshd = sshd_of_all_kinds
    text = sshd.sh(f"cat /etc/ssh/ssh_host_{pinned}_key.pub")
    assert make(sshd.endpoint(host_key=text.strip())).run("echo in").stdout == "in\n"


@pytest.fixture
def bastion(sshd: Sshd, connections: Connections, tmp_path: Path) -> str:
    """A name in the user's own ssh_config for the container, to be jumped through."""
    folder = tmp_path / "home" / ".ssh"
    folder.mkdir(parents=True)
    port, user_hosts = sshd.port, folder / "known_hosts"
    user_hosts.write_text(f"[127.0.0.1]:{port} {sshd.host_key}\n")
    (folder / "config").write_text(
        f"Host bastion\n HostName 127.0.0.1\n Port {port}\n User student\n"
        f" IdentityFile {sshd.key}\n UserKnownHostsFile {user_hosts}\n"
    )
    return "bastion"


def behind(sshd: Sshd, jump: str) -> Endpoint:
    """The container's sshd as seen from inside itself."""
    return msgspec.structs.replace(sshd.endpoint(), port=22, jump=jump)


@pytest.mark.parametrize("make", REAL[:2], indirect=True)
def test_openssh_jumps_through_a_host_of_the_users_config(
    make: Make, sshd: Sshd, bastion: str
) -> None:
    assert make(behind(sshd, bastion)).run("echo $SSH_CONNECTION").stdout.endswith(" 22\n")


@pytest.mark.parametrize("make", REAL[:2], indirect=True)
def test_a_jump_host_with_an_unknown_key_stops(
    make: Make, sshd: Sshd, bastion: str, tmp_path: Path
) -> None:
    (tmp_path / "home" / ".ssh" / "known_hosts").unlink()
    with pytest.raises(HostKeyError, match="jump host bastion"):
        make(behind(sshd, bastion)).run("true")


def test_fabric_jumps(sshd: Sshd, bastion: str, tmp_path: Path) -> None:
    endpoint = behind(sshd, f"student@127.0.0.1:{sshd.port}")
    known_hosts = tmp_path / "home" / ".ssh" / "known_hosts"
    transport = FabricTransport(endpoint, known_hosts=known_hosts)
    assert transport.run("echo there").stdout == "there\n"
    transport.close()
    assert fetch_host_key(endpoint, known_hosts) == sshd.host_key
    with pytest.raises(HostKeyError, match="jump host"):
        FabricTransport(endpoint).run("true")


@real_transports
def test_a_proxy_command(make: Make, sshd: Sshd) -> None:
    proxy = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/%p; cat <&3 & exec cat >&3'"
    endpoint = sshd.endpoint(host="only.its.proxy.knows", proxy_command=proxy)
    assert make(endpoint).run("echo there").stdout == "there\n"
    assert fetch_host_key(endpoint) == sshd.host_key


@real_transports
def test_a_proxy_command_that_outlives_the_connection(make: Make, sshd: Sshd) -> None:
    """Its child holds ssh's stderr open; the command's answer is not kept waiting for that."""
    proxy = "bash -c 'sleep 20 & exec 3<>/dev/tcp/127.0.0.1/%p; cat <&3 & exec cat >&3'"
    endpoint = sshd.endpoint(host="only.its.proxy.knows", proxy_command=proxy)
    transport = make(endpoint)
    assert transport.run("echo there; echo here >&2; exit 3", check=False, timeout_s=10) == Result(
        code=3, stdout="there\n", stderr="here\n"
    )
    transport.close()


def test_fetch_host_key_needs_no_login(sshd: Sshd) -> None:
    stranger = Endpoint(host="127.0.0.1", port=sshd.port, user="nobody-knows")
    assert fetch_host_key(stranger) == sshd.host_key


@real_transports
def test_single_files_over_sftp(transport: Transport, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\0\1" * 500_000)
    (tmp_path / "a").chmod(0o640)
    target = f"/tmp/{tmp_path.name} b"
    assert upload_file(transport, tmp_path / "a", target, SilentReporter()) == 1_000_000
    assert transport.run(command("stat", "-c", "%s %a", target)).stdout == "1000000 640\n"
    assert download_file(transport, target, tmp_path / "b", SilentReporter()) == 1_000_000
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert transport.run("ls /tmp | grep labctl-part", check=False).code == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a", "b"]


@real_transports
def test_a_single_file_that_is_not_there(transport: Transport, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no none"):
        download_file(transport, "none", tmp_path / "b", SilentReporter())
    with pytest.raises(UsageError, match="is a directory"):
        download_file(transport, "/tmp", tmp_path / "b", SilentReporter())
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(NotFoundError, match="there is no directory /none on "):
        upload_file(transport, tmp_path / "a", "/none/a", SilentReporter())
    assert not (tmp_path / "b").exists()
    assert transport.run("echo in").stdout == "in\n"


def test_fabric_asks_for_the_fast_ways(sshd: Sshd) -> None:
    import socket

    from labctl.transports.fabric_login import log_in

    login = log_in(sshd.endpoint())
    assert login.transport.local_cipher == "aes128-gcm@openssh.com"
    assert login.transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    login.close()


def test_one_master_serves_all_and_close_ends_it(sshd: Sshd, connections: Connections) -> None:
    server = sshd.server()
    transports = [connections.open(server) for _ in range(4)]
    gate = threading.Barrier(4)

    def ask(transport: Transport) -> str:
        gate.wait()
        return transport.run("echo $SSH_CONNECTION").stdout

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, transports))) == 1
    connections.close(server)
    control = transports[0].control_path
    wait_for(lambda: not Path(control).exists())


def test_people_rsync_through_the_ssh_config(
    sshd: Sshd, connections: Connections, tmp_path: Path
) -> None:
    server = sshd.server()
    transport = connections.open(server)
    (tmp_path / "file").write_text("content")
    shell = shlex.join(["ssh", "-F", str(connections.config_path(server.id))])
    words = ["rsync", "-e", shell, str(tmp_path / "file"), f"{server.alias}:got"]
    subprocess.run(words, check=True)
    assert transport.run("cat got").stdout == "content"
    connections.close(server)

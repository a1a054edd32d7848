"""The files that describe servers to ssh, and the keys; ssh itself reads them back."""

from __future__ import annotations

import getpass
import os
import socket
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from store_sshd import ensure_key_pair as ensure_test_key
from store_sshd import find_free_port, run_sshd

from labctl.config.identity import replace_file
from labctl.errors import ConnectError, HostKeyError, LabError, PolicyError, UsageError
from labctl.model import Endpoint, Offer, Server
from labctl.servers.connections import Connections
from labctl.servers.host_keys import ensure_key_pair, fingerprint
from labctl.transports.openssh import OpenSshTransport
from labctl.transports.ssh_client import runtime_dir

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJv3rUsymaY5pzRXGMkdoTCoyrTVNNhqeNPGdNuedeMT"
ENDPOINT = Endpoint(host="127.0.0.1", port=2222, user="student", identity="/k", host_key=KEY)


def server(
    server_id: str = "box-1", alias: str = "digits", endpoint: Endpoint = ENDPOINT
) -> Server:
    return Server(
        id=server_id, provider="local", lab="digits", lab_id="x", alias=alias, endpoint=endpoint,
        offer=Offer(provider="local", type="container"), created_at=0.0,
    )  # fmt: skip


@pytest.fixture
def user_config(tmp_path: Path) -> Path:
    return tmp_path / "home" / ".ssh" / "config"


@pytest.fixture
def connections(tmp_path: Path, user_config: Path) -> Connections:
    return Connections(tmp_path / "state" / "ssh", user_config)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_write_leaves(connections: Connections, user_config: Path, tmp_path: Path) -> None:
    path = connections.write(server())
    assert path == connections.config_path("box-1") == tmp_path / "state/ssh/box-1/config"
    assert (path.parent / "known_hosts").read_text() == f"box-1 {KEY}\n"
    for file in (path, path.parent / "known_hosts", path.parent.parent / "config", user_config):
        assert mode(file) == 0o600
    for folder in (path.parent, path.parent.parent, user_config.parent):
        assert mode(folder) == 0o700
    assert not list(tmp_path.rglob(".*-*")), "no drafts are left"


def test_ssh_finds_the_server_by_both_names(connections: Connections, user_config: Path) -> None:
    connections.write(server())
    connections.write(server("box-2", "letters", msgspec.structs.replace(ENDPOINT, port=2223)))
    for name, port in (("digits", 2222), ("box-1", 2222), ("letters", 2223), ("box-2", 2223)):
        assert connections.user_config.resolve_alias(name).port == port
    connections.forget("box-2")
    connections.forget("box-2")
    assert connections.user_config.resolve_alias("letters").port == 22


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("missing", [{"host": ""}, {"port": 0}])
def test_a_server_that_has_no_address_yet_does_not_answer(
    tmp_path: Path, user_config: Path, in_process: bool, missing: dict[str, Any]
) -> None:
    connections = Connections(tmp_path / "ssh", user_config, in_process=in_process)
    starting = server("box-1", "digits", msgspec.structs.replace(ENDPOINT, **missing))
    for connect in (connections.open, connections.reopen):
        with pytest.raises(ConnectError, match="digits has no address") as caught:
            connect(starting)
        assert caught.value.hint == "labctl up"
    assert not user_config.exists()


def test_the_users_config_keeps_every_byte(connections: Connections, user_config: Path) -> None:
    user_config.parent.mkdir(parents=True)
    theirs = b"# caf\xe9\r\nHost *\r\n\tUser me  \r\nHost last"
    user_config.write_bytes(theirs)
    user_config.chmod(0o640)
    connections.write(server())
    first = user_config.read_bytes()
    assert first.endswith(b"\n" + theirs)
    assert first.removesuffix(theirs).count(b"\n") == 1
    connections.write(server("box-2", "letters"))
    assert user_config.read_bytes() == first
    assert mode(user_config) == 0o640


def test_the_include_goes_with_the_last_server(connections: Connections, user_config: Path) -> None:
    user_config.parent.mkdir(parents=True)
    theirs = b"# caf\xe9\r\nHost *\r\n\tUser me  \r\nHost last"
    user_config.write_bytes(theirs)
    user_config.chmod(0o640)
    connections.write(server())
    connections.write(server("box-2", "letters"))
    connections.forget("box-1")
    assert user_config.read_bytes() != theirs
    connections.forget("box-2")
    assert (user_config.read_bytes(), mode(user_config)) == (theirs, 0o640)
    connections.write(server())
    assert connections.user_config.resolve_alias("digits").port == 2222


def test_a_config_that_labctl_created_goes_with_the_last_server(
    connections: Connections, user_config: Path
) -> None:
    connections.write(server())
    connections.forget("box-1")
    assert not user_config.exists()
    user_config.touch()  # an empty file of the user
    connections.write(server())
    connections.forget("box-1")
    assert user_config.read_bytes() == b""


def test_a_config_that_the_user_has_filled_stays(
    connections: Connections, user_config: Path
) -> None:
    connections.write(server())
    with user_config.open("a") as file:
        file.write("Host box\n")
    connections.forget("box-1")
    assert user_config.read_text() == "Host box\n"


def test_the_include_stays_if_a_server_appears_meanwhile(
    connections: Connections, user_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections.write(server())
    remove = connections.user_config.remove_line

    def remove_late(line: str) -> None:
        """Another process writes a server, and sees the Include that is removed then."""
        Connections(connections.config_path("x").parents[1], user_config).write(
            server("box-2", "letters")
        )
        remove(line)

    monkeypatch.setattr(connections.user_config, "remove_line", remove_late)
    connections.forget("box-1")
    assert connections.user_config.resolve_alias("letters").port == 2222


def test_a_symbolic_link_to_dotfiles_stays_one(
    connections: Connections, user_config: Path, tmp_path: Path
) -> None:
    user_config.parent.mkdir(parents=True)
    (tmp_path / "dotfiles").write_text("Host a\n")
    user_config.symlink_to(tmp_path / "dotfiles")
    connections.write(server())
    assert user_config.is_symlink()
    assert (tmp_path / "dotfiles").read_text().endswith("\nHost a\n")


def test_a_state_directory_with_an_awkward_name(user_config: Path, tmp_path: Path) -> None:
    connections = Connections(tmp_path / "a [b] 100% c*" / "ssh", user_config)
    connections.write(server())
    assert connections.user_config.resolve_alias("digits").port == 2222


def test_many_processes_write_one_include(tmp_path: Path, user_config: Path) -> None:
    def write(number: int) -> None:
        mine = Connections(tmp_path / "ssh", user_config)
        mine.write(server(f"box-{number}", f"lab-{number}"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(16)))
    assert user_config.read_text().count("Include") == 1
    assert (
        Connections(tmp_path / "ssh", user_config).user_config.resolve_alias("lab-15").port == 2222
    )


def test_an_alias_of_the_users_is_never_shadowed(
    connections: Connections, user_config: Path
) -> None:
    (user_config.parent / "conf.d").mkdir(parents=True)
    user_config.write_text("Include conf.d/*.conf\nInclude nothing/*\nHost gpu? *.example\n")
    (user_config.parent / "conf.d" / "a.conf").write_text("Host other digits\nInclude ../config\n")
    assert not connections.is_alias_free("digits")
    assert connections.is_alias_free("letters")
    with pytest.raises(UsageError, match="digits") as caught:
        connections.write(server())
    assert caught.value.hint
    assert "state" not in user_config.read_text()


def test_names_are_compared_while_another_thread_adds_a_server(connections: Connections) -> None:
    """As in a class that starts: each thread names its server and looks at those of the others."""
    connections.write(server())
    seen = iter(connections._list_own_hosts().items())
    connections.write(server("box-2", alias="letters"))
    assert not connections.is_alias_free("letters")
    assert [name for name, _ in seen] == ["box-1"]


def test_an_alias_of_another_server_of_ours_is_taken(connections: Connections) -> None:
    connections.write(server())
    assert connections.is_alias_free("digits", "box-1")
    assert not connections.is_alias_free("digits")
    with pytest.raises(UsageError):
        connections.write(server("box-2"))
    connections.forget("box-1")
    connections.write(server("box-2"))


def test_a_server_that_comes_while_others_are_forgotten_stays(connections: Connections) -> None:
    connections.write(server())
    connections.write(server("box-2", "letters"))

    def on_record() -> list[str]:
        connections.write(server("box-3", "words"))
        return ["box-2"]

    connections.forget_unrecorded(on_record)
    there = [name for name in ("box-1", "box-2", "box-3") if connections.config_path(name).exists()]
    assert there == ["box-2", "box-3"]


@pytest.mark.parametrize("name", ["../x", "a/b", "config", "endpoints", "", "-x", ".lock"])
def test_server_ids_stay_inside(connections: Connections, name: str) -> None:
    with pytest.raises(UsageError):
        connections.write(server(name))
    with pytest.raises(UsageError):
        connections.forget(name)


def test_an_alias_of_the_users_config(
    connections: Connections, user_config: Path, tmp_path: Path
) -> None:
    user_config.parent.mkdir(parents=True)
    key = tmp_path / "gpu key"
    key.write_text("")
    known = tmp_path / "known"
    known.write_text(f"the-gpu {KEY}\n[gpu1.lab.example]:2200 ssh-rsa AAAA\n")
    user_config.write_text(
        f'Host gpu\n HostName gpu1.lab.example\n Port 2200\n User alice\n IdentityFile "{key}"\n'
        f" ProxyJump bob@bastion:22\n HostKeyAlias the-gpu\n UserKnownHostsFile {known}\n"
        "Host proxied\n ProxyCommand nc %h %p\n User carol\n"
    )
    assert connections.user_config.resolve_alias("gpu") == Endpoint(
        host="gpu1.lab.example", port=2200, user="alice", identity=str(key),
        jump="bob@bastion:22", host_key=KEY,
    )  # fmt: skip
    proxied = connections.user_config.resolve_alias("proxied")
    assert (proxied.host, proxied.identity, proxied.jump) == ("proxied", "", "")
    assert proxied.proxy_command == "nc %h %p"
    with pytest.raises(UsageError):
        connections.user_config.resolve_alias("-oProxyCommand=id")


def test_a_broken_users_config_is_told(connections: Connections, user_config: Path) -> None:
    user_config.parent.mkdir(parents=True)
    user_config.write_text("Nonsense here\n")
    with pytest.raises(LabError, match="cannot read its config") as caught:
        connections.user_config.resolve_alias("gpu")
    assert "onsense" in caught.value.why


def test_a_revoked_key_is_refused(connections: Connections, user_config: Path) -> None:
    user_config.parent.mkdir(parents=True)
    (user_config.parent / "known_hosts").write_text(f"@revoked 127.0.0.1 {KEY}\n")
    from labctl.events import SilentReporter

    unpinned = msgspec.structs.replace(ENDPOINT, port=22, host_key="")
    with pytest.raises(HostKeyError, match="revoked"):
        connections.settle_host_key(unpinned, SilentReporter())


def test_make_key_once(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "id_ed25519"
    line = ensure_key_pair(path)
    private = path.read_bytes()
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    said = subprocess.run(["ssh-keygen", "-y", "-f", str(path)], capture_output=True, text=True)
    assert said.stdout.split()[:2] == line.split()[:2]
    assert path.with_name("id_ed25519.pub").read_text() == line + "\n"
    assert ensure_key_pair(path) == line
    assert path.read_bytes() == private
    shown = subprocess.run(["ssh-keygen", "-lf", str(path)], capture_output=True, text=True).stdout
    assert shown.split()[1] == fingerprint(line)


def test_two_processes_make_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        lines = set(pool.map(lambda _: ensure_key_pair(tmp_path / "key"), range(6)))
    assert len(lines) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.pub"]


def test_a_file_that_is_no_key_is_told(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("not a key")
    with pytest.raises(LabError, match="not a private key"):
        ensure_key_pair(tmp_path / "key")
    assert (tmp_path / "key").read_text() == "not a key"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "inside").write_text("")
    with pytest.raises(OSError):
        replace_file(target, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_directory_for_sockets_is_private_and_ours(tmp_path: Path) -> None:
    path = runtime_dir(tmp_path)
    assert (path.name, mode(path)) == (f"labctl-{os.getuid()}", 0o700)
    path.chmod(0o755)
    assert mode(runtime_dir(tmp_path)) == 0o700
    path.rmdir()
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PolicyError, match="belongs to another user"):
        runtime_dir(tmp_path)


def test_control_paths_are_short_enough_for_macos(connections: Connections) -> None:
    """A socket's path may have 104 bytes there, of which ssh takes 17 while it makes it."""
    config = connections.write(server("a-very-long-server-id-" + "x" * 60))
    transport = OpenSshTransport(config, "box-1", ENDPOINT)
    assert len(transport.control_path) + 17 < 104
    people = next(line for line in config.read_text().splitlines() if "ControlPath" in line)
    assert len(people.split()[1]) - len("%C") + 40 + 17 < 104


def test_another_way_to_a_server_has_another_master(connections: Connections) -> None:
    config = connections.write(server())
    moved = msgspec.structs.replace(ENDPOINT, port=2223)
    first, second = (OpenSshTransport(config, "box-1", each) for each in (ENDPOINT, moved))
    assert first.control_path != second.control_path


def test_constructing_never_touches_the_network(connections: Connections) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        connections.open(server(endpoint=msgspec.structs.replace(ENDPOINT, port=port)))
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_machine_without_ssh_says_so(
    connections: Connections, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transport = connections.open(server())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match="ssh is not installed on this machine") as caught:
        transport.run("true")
    assert caught.value.hint
    assert type(connections.open(server())).__name__ == "FabricTransport"


def test_the_connection_to_a_machine_ends_once_the_lab_has_left_it(
    connections: Connections, tmp_path: Path
) -> None:
    host_key = ensure_test_key(tmp_path / "host")
    (tmp_path / "authorized_keys").write_text(ensure_test_key(tmp_path / "key") + "\n")
    port = find_free_port()
    endpoint = Endpoint(
        host="127.0.0.1", port=port, user=getpass.getuser(), identity=str(tmp_path / "key"),
        host_key=host_key,
    )  # fmt: skip
    with run_sshd(tmp_path, port):
        machine = connections.connect(endpoint)
        assert isinstance(machine, OpenSshTransport)
        assert machine.run("echo here").stdout == "here\n"
        assert Path(machine.control_path).exists()
        with ThreadPoolExecutor(1) as threads:
            # of another process, which is not cut off
            other = threads.submit(machine.run, f"touch {tmp_path}/begun; sleep 2; echo ended")
            deadline = time.monotonic() + 20
            while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            connections.retire_machines()
            assert not Path(machine.control_path).exists()
            assert other.result().stdout == "ended\n"
        while list_masters(machine) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list_masters(machine) == []


def list_masters(machine: OpenSshTransport) -> list[str]:
    """List the processes of labctl's ssh to this machine."""
    words = ["pgrep", "-f", machine.control_path]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()

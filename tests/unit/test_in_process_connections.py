"""Which transport a command gets, and how long a connection inside this process lives."""

from __future__ import annotations

import gc
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.model import Endpoint, Offer, Server
from labctl.servers.connections import Connections
from labctl.transports import fabric
from labctl.transports.fabric import FabricTransport
from labctl.transports.openssh import OpenSshTransport

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJv3rUsymaY5pzRXGMkdoTCoyrTVNNhqeNPGdNuedeMT"


class LoginRecord:
    """A login without a network."""

    def __init__(self) -> None:
        self.is_alive = True

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    return make_identity(tmp_path / "id_ed25519", passphrase="")


def make_identity(path: Path, passphrase: str) -> Path:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)]
    subprocess.run(words, check=True)
    return path


def make_server(identity: object, port: int = 2222) -> Server:
    endpoint = Endpoint(
        host="127.0.0.1", port=port, user="student", identity=str(identity), host_key=KEY
    )
    return Server(
        id="box-1",
        provider="local",
        lab="digits",
        lab_id="x",
        alias="digits",
        endpoint=endpoint,
        offer=Offer(provider="local", type="container"),
        created_at=0.0,
    )


@pytest.fixture
def in_process(tmp_path: Path) -> Connections:
    return Connections(tmp_path / "ssh", tmp_path / "home" / "config", in_process=True)


def test_a_command_of_the_shell_uses_the_users_ssh(tmp_path: Path, identity: Path) -> None:
    connections = Connections(tmp_path / "ssh", tmp_path / "home" / "config")
    assert isinstance(connections.open(make_server(identity)), OpenSshTransport)


def test_a_program_has_one_connection_to_a_server(in_process: Connections, identity: Path) -> None:
    first = in_process.open(make_server(identity))
    assert isinstance(first, FabricTransport)
    assert in_process.open(make_server(identity)) is first
    assert in_process.reopen(make_server(identity)) is first
    assert in_process.open(make_server(identity, port=2223)) is not first


def test_its_key_is_read_once(
    in_process: Connections, identity: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Endpoint] = []

    def count(endpoint: Endpoint) -> bool:
        reads.append(endpoint)
        return True

    monkeypatch.setattr("labctl.transports.fabric_login.can_log_in", count)
    for _ in range(3):
        in_process.reopen(make_server(identity))
    assert len(reads) == 1


def test_rsync_goes_through_the_users_ssh(
    in_process: Connections, identity: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenSshTransport, "remote_shell", lambda self: self.endpoint)
    assert in_process.open(make_server(identity)).remote_shell() is not None


@pytest.mark.parametrize("kind", ["none", "absent", "passphrase"])
def test_a_key_that_asks_or_is_elsewhere_is_left_to_the_users_ssh(
    in_process: Connections, tmp_path: Path, kind: str
) -> None:
    identity: Any = {"none": "", "absent": tmp_path / "nowhere"}.get(kind)
    if identity is None:
        identity = make_identity(tmp_path / "locked", passphrase="secret")
    assert isinstance(in_process.open(make_server(identity)), OpenSshTransport)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("nc %h %p", FabricTransport),
        ("nc %h %p --user %r --share 50%%u", FabricTransport),
        ("corp-proxy --home %d %h", OpenSshTransport),
        ("corp-proxy %n", OpenSshTransport),
    ],
)
def test_a_proxy_command_with_other_tokens_is_left_to_the_users_ssh(
    in_process: Connections, identity: Path, command: str, kind: type
) -> None:
    server = make_server(identity)
    endpoint = msgspec.structs.replace(server.endpoint, proxy_command=command)
    server = msgspec.structs.replace(server, endpoint=endpoint)
    assert isinstance(in_process.open(server), kind)


def test_a_connection_closes_with_the_last_who_uses_it(
    in_process: Connections, identity: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = LoginRecord()
    monkeypatch.setattr(fabric, "log_in", lambda endpoint, known_hosts: login)
    transport = in_process.open(make_server(identity))
    assert isinstance(transport, FabricTransport)
    assert transport._connect() is login
    moved = msgspec.structs.replace(make_server(identity), alias="other")
    assert in_process.reopen(moved) is transport
    in_process.open(make_server(identity, port=2223))  # the server has another address now
    assert login.is_alive, "a command may still use it"
    del transport
    gc.collect()
    assert not login.is_alive


def test_closing_a_server_closes_its_connection(
    in_process: Connections, identity: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = LoginRecord()
    monkeypatch.setattr(fabric, "log_in", lambda endpoint, known_hosts: login)
    server = make_server(identity)
    transport = in_process.open(server)
    assert isinstance(transport, FabricTransport)
    transport._connect()
    in_process.close(server)
    assert not login.is_alive
    assert in_process.open(server) is not transport

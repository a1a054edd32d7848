"""The port at which a service is published on the server."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from engine_socket import EngineSocket, engine_socket

from labctl.agent.host.engine import EngineRequestError
from labctl.agent.host.engine_objects import NewContainer, NewHostConfig, PortBinding
from labctl.agent.runs.service_ports import create_and_start, is_free, is_own_listener


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSocket]:
    with engine_socket() as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        yield engine


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
    return number


def build_body(port: int) -> NewContainer:
    config = NewHostConfig(PortBindings={f"{port}/tcp": (PortBinding(HostIp="127.0.0.1"),)})
    return NewContainer(Image="digits:1", HostConfig=config)


def list_host_ports(engine: EngineSocket, port: int) -> list[str]:
    """The port that each request to create the container named, "" for any."""
    return [
        body["HostConfig"]["PortBindings"][f"{port}/tcp"][0].get("HostPort", "")
        for method, path, body in engine.asked
        if method == "POST" and "/containers/create" in path
    ]


def test_a_service_is_published_at_its_usual_port(engine: EngineSocket, port: int) -> None:
    engine.answers = lambda method, path, body: (204, b"") if "start" in path else (201, {})
    create_and_start("web", build_body(port), port)
    assert list_host_ports(engine, port) == [str(port)]


def test_a_taken_port_is_left_to_its_holder(engine: EngineSocket) -> None:
    engine.answers = lambda method, path, body: (204, b"") if "start" in path else (201, {})
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        assert not is_free(taken)
        create_and_start("web", build_body(taken), taken)
        assert list_host_ports(engine, taken) == [""]


def test_a_port_that_the_engine_refuses_is_replaced(engine: EngineSocket, port: int) -> None:
    starts: list[str] = []

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/start"):
            starts.append(path)
            if len(starts) == 1:
                return 500, {"message": "port is already allocated"}
            return 204, b""
        return 201, {}

    engine.answers = answer
    create_and_start("web", build_body(port), port)
    assert list_host_ports(engine, port) == [str(port), ""]
    assert [method for method, _, _ in engine.asked].count("DELETE") == 1


def test_a_service_that_cannot_start_leaves_no_container(engine: EngineSocket, port: int) -> None:
    engine.answers = lambda method, path, body: (
        (500, {"message": "no"}) if "start" in path else ((201, {}))
    )
    with pytest.raises(EngineRequestError):
        create_and_start("web", build_body(port), port)
    assert [method for method, _, _ in engine.asked][-1] == "DELETE"


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_is_this_accounts_if_it_listens_there(address: str, port: int) -> None:
    assert not is_own_listener(port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family):
        assert is_own_listener(port)
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        assert not is_own_listener(port)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of another account")
def test_a_port_that_a_neighbour_took_is_not_this_accounts(port: int) -> None:
    lines = f"""
import socket
server = socket.create_server(("127.0.0.1", {port}))
print(flush=True)
server.accept()
"""
    words = ["/usr/bin/python3", "-c", lines]
    with subprocess.Popen(words, stdout=subprocess.PIPE, user=65534) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert not is_own_listener(port)
        other.kill()

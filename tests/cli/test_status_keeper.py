"""status of a course's lab while the keeper is down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl import Lab
from labctl.model import Endpoint, Offer, Server
from labctl.state.ledgers import HANDED

Labctl = Callable[..., Any]
# Nothing listens on port 1.
LAB_YAML = f"""\
lab: ml-alice
server:
  provider: course
  course:
    course: ml
    student: alice
    keeper: ssh://labctl@127.0.0.1:1
    host_key: "ssh-ed25519 {"A" * 68}"
    seat: "0123456789ab"
"""


def test_refresh_shows_what_is_known_and_that_the_keeper_did_not_answer(
    home: Path, labctl: Labctl
) -> None:
    (home / "digits" / "lab.yaml").write_text(LAB_YAML)
    said = labctl("status", "--refresh")
    assert said.code == 75
    assert said.err == "showing what is known: 127.0.0.1 refuses connections to port 1\n"
    assert said.out.startswith("ml-alice: no server")
    body = json.loads(labctl("status", "--refresh", "--json").out)
    assert body["provider_problem"] == "127.0.0.1 refuses connections to port 1"
    said = labctl("status")
    assert said.code == 0, "a keeper that is down is asked, but was not asked for"
    assert "127.0.0.1 refuses connections to port 1" in said.err
    assert said.out.startswith("ml-alice: no server")


def test_refresh_without_a_network_shows_what_is_known(home: Path, labctl: Labctl) -> None:
    server = "{provider: static, static: {hosts: [{alias: gpu1}]}}"
    (home / "digits" / "lab.yaml").write_text(f"lab: digits\nserver: {server}\n")
    (home / ".ssh").mkdir(mode=0o700)
    (home / ".ssh" / "config").write_text("Host gpu1\n  HostName 127.0.0.1\n  Port 1\n")
    said = labctl("status", "--refresh")
    assert said.code == 75
    assert said.err.startswith("showing what is known: ")
    assert said.out.startswith("digits: no server")
    assert json.loads(labctl("status", "--refresh", "--json").out)["provider_problem"]


def test_a_keeper_that_cannot_be_reached_is_not_a_server_that_up_could_find(
    home: Path, labctl: Labctl
) -> None:
    refused = labctl("run", "--up", "--recover", "--keeper", "ann@127.0.0.1:1")
    assert refused.code == 255
    assert refused.err.startswith("labctl: 127.0.0.1 refuses connections to port 1\n")
    assert "  next: ssh -p 1 ann@127.0.0.1\n" in refused.err
    assert "labctl up" not in refused.err


def test_down_says_that_the_keeper_is_unreachable_before_it_asks(
    home: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    server = Server(
        id="box", provider="local", lab="digits", lab_id=lab.id, alias="digits", state="stopped",
        created_at=1.0, endpoint=Endpoint(host="127.0.0.1"),
        offer=Offer(provider="local", type="container"),
    )  # fmt: skip
    lab.context.state.save_server(server)
    lab.context.state.record(HANDED, lab_id=lab.id, detail={"keeper": "ann@127.0.0.1:1"})
    lab.context.state.close()
    monkeypatch.setattr("labctl.lifecycle.down.adoption.adopt", lambda context: server)
    refused = labctl("down")
    assert refused.code == 3
    assert refused.err.splitlines()[0].startswith("labctl: cannot reach the keeper at ann@127.0.")
    assert "remove the server" not in refused.err
    assert "  next: labctl down\n" in refused.err


@pytest.fixture
def static_lab(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lab whose machine is off: nothing listens on port 1."""
    hosts = "[{host: 127.0.0.1, port: 1, user: ann}]"
    text = f"lab: digits\nserver: {{provider: static, static: {{hosts: {hosts}}}}}\n"
    (home / "digits" / "lab.yaml").write_text(text)
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    server = Server(
        id="static-127-0-0-1-1-tok", provider="static", lab="digits", lab_id=lab.id, created_at=1.0,
        alias="digits", endpoint=Endpoint(host="127.0.0.1", port=1, user="ann"), state="running",
        offer=Offer(provider="static", type="gpu1"),
    )  # fmt: skip
    lab.context.state.save_server(server)
    lab.context.state.close()
    monkeypatch.setattr("labctl.servers.adoption.adopt", lambda context: server)
    return home / "digits"


def test_a_static_machine_that_is_off_is_not_one_that_labctl_removes(
    static_lab: Path, labctl: Labctl
) -> None:
    said = labctl("status", "--refresh")
    assert "digits: NOT REACHABLE, static gpu1\n" in said.out
    assert "  labctl down --discard    end your lease, without its results\n" in said.out
    assert "remove the server" not in said.out


def test_doctor_says_to_turn_a_static_machine_on(static_lab: Path, labctl: Labctl) -> None:
    out = labctl("doctor").out
    assert "after you checked that 127.0.0.1:1 is on and its sshd runs" in out
    assert "labctl down --discard\n" in out
    assert "another address" not in out
    assert "finds a restarted server" not in out


def test_a_jump_host_that_is_off_is_the_next_thing_to_look_at(
    static_lab: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab.load(static_lab, environ={"HOME": str(static_lab.parent)})
    server = lab.context.get_server()
    key = f"ssh-ed25519 {'A' * 68}"
    endpoint = msgspec.structs.replace(server.endpoint, jump="ann@127.0.0.1:1", host_key=key)
    lab.context.state.save_server(msgspec.structs.replace(server, endpoint=endpoint))
    lab.context.state.close()
    line = next(text for text in labctl("doctor").out.split("!!  ") if text.startswith("digits:"))
    assert "cannot be reached through the jump host ann@127.0.0.1:1" in line
    assert "next: ssh -p 1 ann@127.0.0.1\n" in line

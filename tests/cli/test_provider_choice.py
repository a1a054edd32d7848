"""Commands after `labctl up --provider NAME` use that provider too, while the lab has a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl import Lab
from labctl.lifecycle import up
from labctl.model import Endpoint, Offer, Run, RunState, Server
from labctl.servers import adoption
from labctl.servers.provider_choice import RECOVERABLE

Labctl = Callable[..., Any]
# Nothing listens on port 1.
LAB_YAML = """\
lab: digits
server: {provider: local, static: {hosts: [{alias: gpu1}]}}
"""
SSH_CONFIG = "Host gpu1\n  HostName 127.0.0.1\n  Port 1\n"


@pytest.fixture
def server(home: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server of `labctl up --provider static`."""
    (home / "digits" / "lab.yaml").write_text(LAB_YAML)
    (home / ".ssh").mkdir(mode=0o700)
    (home / ".ssh" / "config").write_text(SSH_CONFIG)
    server = Server(
        id="gpu1-a", provider="static", lab="digits", lab_id="", alias="digits", created_at=1.0,
        endpoint=Endpoint(host="127.0.0.1", port=1), offer=Offer(provider="static", type="gpu1"),
        state="running",
    )  # fmt: skip

    def create(context: Any, *_: Any) -> Server:
        made = msgspec.structs.replace(server, lab_id=context.lab_id)
        context.state.save_server(made)
        return made

    monkeypatch.setattr(up, "adopt", lambda context, listed: None)
    monkeypatch.setattr(up.attempts, "create_server", create)
    monkeypatch.setattr(up, "use_server", lambda context, server: server)
    assert labctl("up", "--provider", "static", "--yes").code == 0
    return server


@pytest.mark.parametrize("command", ["status --refresh", "down", "run -- true"])
def test_a_later_command_goes_to_the_provider_of_the_server(
    server: Server, labctl: Labctl, command: str
) -> None:
    said = labctl(*command.split())
    assert "not at local" not in said.err
    assert any(text in said.err for text in ("gpu1", "leased"))


def test_without_the_server_lab_yaml_selects_again(server: Server, home: Path) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    assert lab.config.server.provider == "static"
    lab.context.state.drop_server(server.id)
    lab.context.state.close()
    assert Lab.load(home / "digits", environ={"HOME": str(home)}).config.server.provider == "local"


def test_an_option_for_another_provider_is_named_and_not_lab_yaml(
    server: Server, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "adopt", adoption.adopt)
    said = labctl("up", "--provider", "local", "--yes")
    assert said.code == 3
    assert "the server of digits is at static, not at local\n" in said.err
    assert "--provider now selects local, but gpu1-a is still running" in said.err
    assert said.err.endswith("next: labctl down\n")


def test_another_provider_is_refused_before_the_question_about_lab_yaml(
    server: Server, home: Path, labctl: Labctl
) -> None:
    lab_yaml = home / "digits" / "lab.yaml"
    lab_yaml.write_text("lab: digits\nserver: {provider: static, static: {hosts: [gpu1]}}\n")
    said = labctl("up", "--provider", "aws")
    assert said.code == 3
    assert said.err.startswith("labctl: the server of digits is at static, not at aws\n")
    assert "approve" not in said.err


def test_a_variable_selects_all_the_same(server: Server, home: Path) -> None:
    environ = {"HOME": str(home), "LABCTL_PROVIDER": "local"}
    assert Lab.load(home / "digits", environ=environ).config.server.provider == "local"


@pytest.mark.parametrize(("state", "selected"), [("lost", "static"), ("exited", "local")])
def test_a_run_to_recover_keeps_the_provider_of_its_lost_server(
    server: Server, home: Path, state: RunState, selected: str
) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    records = lab.context.state
    records.save_run(Run(id="night", lab_id=lab.id, server_id=server.id, state=state))
    records.record(RECOVERABLE, lab_id=lab.id, server_id=server.id, run_id="night")
    records.drop_server(server.id)
    records.close()
    assert Lab.load(home / "digits", environ={"HOME": str(home)}).config.server.provider == selected

"""`labctl up` on a machine that accepts a password but no key, as a user sees it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from password_server import PasswordServer, serve_passwords

from labctl.cli.exit_codes import run_and_exit
from labctl.cli.groups import cli
from labctl.servers.host_keys import ensure_key_pair

Terminal = Callable[..., Any]


class Keyboard(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def machine(home: Path) -> Iterator[PasswordServer]:
    """A static machine in lab.yaml; the user has a key that it does not accept."""
    ensure_key_pair(home / ".ssh" / "id_ed25519")
    with serve_passwords() as server:
        text = (
            "lab: digits\nrun: [python, train.py]\nserver:\n  provider: static\n"
            f"  static: {{hosts: ['ann@127.0.0.1:{server.port}']}}\n"
        )
        (home / "digits" / "lab.yaml").write_text(text)
        yield server


@pytest.fixture
def terminal(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Terminal:
    """`terminal("up", keys="y\\n", passwords=[...])`: a command whose user sits at a terminal."""

    def call(*words: str, keys: str, passwords: list[str]) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["labctl", *words])
        monkeypatch.setattr(sys, "stdin", Keyboard(keys))
        monkeypatch.setattr(click.termui, "hidden_prompt_func", lambda _: passwords.pop(0))
        capsys.readouterr()
        code = run_and_exit(cli)
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return call


def test_without_a_terminal_the_next_command_sets_up_the_key(
    labctl: Any, home: Path, machine: PasswordServer
) -> None:
    said = labctl("up", "--yes")
    assert said.code == 1
    assert "labctl has no terminal to ask for it" in said.err
    key = home / ".ssh" / "id_ed25519"
    assert f"next: ssh-copy-id -i {key} -p {machine.port} ann@127.0.0.1\n" in said.err
    assert machine.passwords == []


def test_a_user_without_a_key_reads_how_to_make_one(
    labctl: Any, home: Path, machine: PasswordServer
) -> None:
    key = home / ".ssh" / "id_ed25519"
    key.unlink()
    said = labctl("up", "--yes")
    assert f"next: ssh-keygen -t ed25519 -f {key} && ssh-copy-id -i {key} " in said.err
    assert not key.exists()


def test_no_password_goes_to_a_host_key_that_is_not_confirmed(
    terminal: Terminal, machine: PasswordServer
) -> None:
    said = terminal("up", keys="y\nn\n", passwords=["wrong"])
    assert said.code == 3
    assert "is not confirmed" in said.err
    assert machine.passwords == []


def test_a_user_may_decline(terminal: Terminal, machine: PasswordServer) -> None:
    said = terminal("up", keys="y\ny\nn\n", passwords=["wrong"])
    assert said.code == 1
    assert "Set up the key there now? [Y/n]" in said.out + said.err
    assert "the machine accepts a password, and no key was set up" in said.err
    assert "next: ssh-copy-id -i " in said.err
    assert machine.passwords == []


def test_three_wrong_passwords_end_the_command(
    terminal: Terminal, home: Path, machine: PasswordServer
) -> None:
    said = terminal("up", keys="y\ny\ny\n", passwords=["wrong-1", "wrong-2", "wrong-3", "wrong-4"])
    assert said.code == 1
    assert machine.passwords == ["wrong-1", "wrong-2", "wrong-3"]
    name = f"ann@127.0.0.1:{machine.port}"
    assert said.err.count(f"{name} does not accept the password; try again") == 2
    assert f"labctl: {name} does not accept the password (3 tries)" in said.err
    assert "next: labctl up\n" in said.err
    files = [path for path in home.rglob("*") if path.is_file()]
    assert not any(b"wrong-" in path.read_bytes() for path in files), "a password is not stored"


def test_a_machine_without_passwords_needs_its_administrator(
    terminal: Terminal, home: Path, machine: PasswordServer
) -> None:
    machine.methods = "publickey"
    said = terminal("up", keys="y\ny\n", passwords=[])
    assert said.code == 1
    assert f"next: cat {home / '.ssh' / 'id_ed25519'}.pub\n" in said.err
    assert "send this public key to the machine's administrator" in said.err

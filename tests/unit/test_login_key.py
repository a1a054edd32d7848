"""Which of the user's keys is set up on a machine: one that their ssh will offer."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from labctl.errors import LabError, NotFoundError
from labctl.servers.host_keys import ensure_key_pair
from labctl.servers.login_key import LoginKey, choose_login_key


@pytest.fixture(autouse=True)
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An SSH agent without keys."""
    socket = tmp_path / "agent"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=-3) as process:
        deadline = time.monotonic() + 20
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
        process.terminate()


def make_locked_key(path: Path) -> str:
    """A key with a passphrase; returns its public line."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "open sesame", "-C", "me", "-f", str(path)]
    subprocess.run(words, check=True)
    return path.with_name(path.name + ".pub").read_text().strip()


def add_to_agent(path: Path) -> None:
    helper = path.with_name("say-it")
    helper.write_text("#!/bin/sh\necho open sesame\n")
    helper.chmod(0o700)
    environ = {**os.environ, "SSH_ASKPASS": str(helper), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run(["ssh-add", "-q", str(path)], check=True, env=environ)


def test_a_user_without_any_key_gets_a_new_one(tmp_path: Path) -> None:
    key = choose_login_key("", tmp_path)
    assert key == LoginKey(path=str(tmp_path / "id_ed25519"))
    line = key.create_if_new()
    assert (tmp_path / "id_ed25519").stat().st_mode & 0o777 == 0o600
    assert choose_login_key("", tmp_path).create_if_new() == line


def test_the_named_key_comes_before_a_default_one(tmp_path: Path) -> None:
    ensure_key_pair(tmp_path / "id_ed25519")
    line = ensure_key_pair(tmp_path / "lab")
    assert choose_login_key(str(tmp_path / "lab"), tmp_path).public_line == line
    with pytest.raises(NotFoundError) as caught:
        choose_login_key(str(tmp_path / "a typo"), tmp_path)
    assert caught.value.hint == f"ssh-keygen -t ed25519 -f '{tmp_path}/a typo'"


def test_a_key_with_a_passphrase_needs_the_agent(tmp_path: Path) -> None:
    path = tmp_path / "id_ed25519"
    line = make_locked_key(path)
    with pytest.raises(LabError) as caught:
        choose_login_key("", tmp_path)
    assert caught.value.hint == f"ssh-add {path}"
    add_to_agent(path)
    assert choose_login_key("", tmp_path) == LoginKey(path=str(path), public_line=line)


def test_a_key_that_only_the_agent_has(tmp_path: Path) -> None:
    line = make_locked_key(tmp_path / "elsewhere")
    add_to_agent(tmp_path / "elsewhere")
    assert choose_login_key("", tmp_path / "home").public_line == " ".join(line.split()[:2])


def test_a_default_key_that_ssh_can_use_comes_before_one_that_it_cannot(tmp_path: Path) -> None:
    make_locked_key(tmp_path / "id_ed25519")
    line = ensure_key_pair(tmp_path / "id_ecdsa")
    assert choose_login_key("", tmp_path).public_line == line

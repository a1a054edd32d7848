"""`labctl ssh --all` over real servers: more of them on one sshd than it lets log in at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from sshd_container import Sshd

from labctl.config import ensure_lab_id, find_paths
from labctl.servers.connections import Connections
from labctl.state import State

pytest_plugins = ["sshd_fixtures"]
pytestmark = pytest.mark.engine

MANY = 14
PROGRAM = str(Path(sys.executable).with_name("labctl"))
Labctl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def labctl(sshd: Sshd, tmp_path: Path) -> Labctl:
    """labctl in a home of its own, whose labs have MANY servers: users of one machine."""
    sshd.stop_sshd()
    sshd.start_sshd("MaxStartups=10:100:10")
    users = ("student", "fishy", "cshy", "noisy")
    places = find_paths({"HOME": str(tmp_path)})
    with State(places.database) as state:
        for number in range(MANY):
            one = sshd.server(f"box-{number:02}", f"lab-{number:02}", user=users[number % 4])
            state.save_server(msgspec.structs.replace(one, state="running"))

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROGRAM, "ssh", "--all", *words],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.fixture(autouse=True)
def no_master_stays(sshd: Sshd, tmp_path: Path) -> Iterator[None]:
    yield
    places = find_paths({"HOME": str(tmp_path)})
    connections = Connections(places.ssh_dir, places.user_ssh_config)
    with State(places.database) as state:
        for one in state.list_servers():
            connections.close(one)
            config = connections.config_path(one.id)
            if config.exists():
                words = ["ssh", "-F", str(config), "-O", "exit", "--", one.alias]
                subprocess.run(words, capture_output=True, check=False)


def test_every_server_answers_in_order_whatever_its_shell(labctl: Labctl) -> None:
    for _ in range(2):  # without masters, and over them
        done = labctl("--", "sh", "-c", "whoami; echo $0 >&2; test -n \"$HOME\" && echo 'a  b'")
        assert done.returncode == 0, done.stderr
        users = ("student", "fishy", "cshy", "noisy")
        expected = [(f"lab-{n:02}", word) for n in range(MANY) for word in (users[n % 4], "a  b")]
        lines = [line.split("  ", 1) for line in done.stdout.splitlines()]
        assert [(name, text) for name, text in lines] == expected
        assert f"succeeded on {MANY} of {MANY} servers" in done.stderr


@pytest.mark.long
def test_failures_are_told_and_counted(labctl: Labctl, sshd: Sshd) -> None:
    done = labctl("--json", "--", "test $(whoami) = student || exit 9")
    answers = json.loads(done.stdout)["servers"]
    assert [one["code"] for one in answers] == [0 if n % 4 == 0 else 9 for n in range(MANY)]
    assert done.returncode == 9
    sshd.stop_sshd()
    gone = labctl("--at-once", "4", "--", "true")
    assert gone.returncode == 255
    assert gone.stderr.count("not reached") == MANY
    assert f"succeeded on 0 of {MANY} servers" in gone.stderr


def test_one_command_after_another_goes_over_one_connection(sshd: Sshd, tmp_path: Path) -> None:
    sshd.stop_sshd()  # the test before may have left it stopped
    sshd.start_sshd()
    root = tmp_path / "digits"
    root.mkdir()
    (root / "lab.yaml").write_text("lab: digits\n")
    with State(find_paths({"HOME": str(tmp_path)}).database) as state:
        one = msgspec.structs.replace(sshd.server(), lab_id=ensure_lab_id(root), state="running")
        state.save_server(one)

    def said() -> str:
        done = subprocess.run(
            [PROGRAM, "ssh", "--", 'echo "$SSH_CONNECTION"; exit 5'],
            cwd=root,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 5, done.stderr
        return done.stdout

    first = said()
    assert len(first.split()) == 4
    assert said() == first, "the port that it came from tells connections apart"

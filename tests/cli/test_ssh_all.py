"""What `labctl ssh` takes for its own options, and what belongs to the command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from labctl.cli.fan_out import print_answer
from labctl.servers.fan_out import ServerResult


def test_all_needs_a_command_and_a_server(labctl: Any) -> None:
    said = labctl("ssh", "--all")
    assert said.code == 255
    assert "next: labctl ssh --all -- uptime" in said.err
    said = labctl("ssh", "--all", "--", "uptime")
    assert said.code == 255
    assert "no lab has a server" in said.err


def test_all_works_where_no_lab_is(labctl: Any, home: Path) -> None:
    (home / "No Lab").mkdir()
    os.chdir(home / "No Lab")
    assert "no lab has a server" in labctl("ssh", "--all", "uptime").err


@pytest.mark.parametrize("words", [("ls", "--all"), ("--", "ls", "--all"), ("ls", "--help")])
def test_what_follows_the_command_is_the_commands(labctl: Any, words: tuple[str, ...]) -> None:
    said = labctl("ssh", *words)
    assert (said.code, said.out) == (255, "")
    assert "digits has no server" in said.err


def test_json_is_for_all_servers(labctl: Any) -> None:
    assert "--json needs --all" in labctl("ssh", "--json", "--", "ls").err


def test_a_servers_lines_bear_its_name_and_steer_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_answer(ServerResult("digits", "s", 0, stdout="one\n\x1b[2Jtwo", stderr="hm\n"), 8)
    said = capsys.readouterr()
    assert said.out == "digits    one\ndigits    \\x1b[2Jtwo\n"
    assert said.err == "digits    hm\n"

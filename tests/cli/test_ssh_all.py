"""What `labctl ssh` takes for its own options, and what belongs to the command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from labctl.cli.fan_out import print_answer
from labctl.cli.plain_ssh import remote_line
from labctl.servers.fan_out import ServerResult
from labctl.shell import portable_line


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


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (("nvidia-smi-x",), 127, "", "nvidia-smi-x: command not found\n"),
        (("nvidia-smi-x", "-L"), 127, "", "nvidia-smi-x: command not found\n"),
        (("/no/such program", "a\\n"), 127, "", "/no/such program: command not found\n"),
        (("printf", "%s|", "a b", "$HOME"), 0, "a b|$HOME|", ""),
        (("echo a; exit 3",), 3, "a\n", ""),
        (("sh", "-c", "exit 5"), 5, "", ""),
        (("pwd",), 0, "/\n", ""),
    ],
)
def test_a_missing_program_is_named_without_the_shell_around_it(
    words: tuple[str, ...], code: int, out: str, err: str
) -> None:
    line = portable_line(remote_line(words))
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_a_servers_lines_bear_its_name_and_steer_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_answer(ServerResult("digits", "s", 0, stdout="one\n\x1b[2Jtwo", stderr="hm\n"), 8)
    said = capsys.readouterr()
    assert said.out == "digits    one\ndigits    \\x1b[2Jtwo\n"
    assert said.err == "digits    hm\n"

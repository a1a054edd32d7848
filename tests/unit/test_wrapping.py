"""Messages fit a terminal of 80 columns, and what is to be pasted stays on one line."""

from __future__ import annotations

import sys

import pytest

from labctl.cli.wrapping import print_message, wrap_lines

PROSE = "the server has no such directory, and so the run would not find the files that it reads"
FIRST = "the server has no such directory, and so the run would not find the files"
YAML = "server: {provider: aws, gpu: T4, aws: {regions: [us-east-1]}}; or wait"
OUTPUTS = "outputs: [checkpoints, logs, code/model.npy, code/predictions/of/all/classes.csv]"
COMMAND = "labctl inventory > hosts && ansible-playbook -i hosts /usr/share/labctl/server.yml -K"

KEY_SETUP = (
    "ssh-keygen -t ed25519 -f ~/.ssh/id_ed25519 && ssh-copy-id -p 2222 student@gpu1.lab.example"
)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (PROSE, [f"{FIRST} that", "it reads"]),
        (f"  {PROSE}", [f"  {FIRST} that", "  it reads"]),
        (f"  - {PROSE}", [f"  - {FIRST}", "    that it reads"]),
        (COMMAND, [COMMAND]),
        (KEY_SETUP, [KEY_SETUP]),
        (f"  {COMMAND}", [f"  {COMMAND}"]),
        (f"--at: {PROSE}", [f"--at: {FIRST}", "that it reads"]),
        (f"--note '{'x' * 80}' --send", [f"--note '{'x' * 80}' --send"]),
        (f"    right = {PROSE}", [f"    right = {PROSE}"]),
        (f"if you know the password: {COMMAND}", ["if you know the password:", COMMAND]),
        (f"type `{COMMAND}`, then wait", ["type", f"`{COMMAND}`,", "then wait"]),
        (f"use another provider for it: {YAML}", ["use another provider for it:", YAML]),
        (f"for later runs too: {OUTPUTS}", ["for later runs too:", OUTPUTS]),
        (f"{'x' * 76} 0.8 s", ["x" * 76, "0.8 s"]),
        ("one\n\ntwo", ["one", "", "two"]),
        ("x" * 90, ["x" * 90]),
    ],
)
def test_prose_is_wrapped_at_words_and_commands_are_not(text: str, lines: list[str]) -> None:
    assert wrap_lines(text) == lines


def test_the_indent_leaves_less_room() -> None:
    first, *_ = wrap_lines(PROSE, 20)
    assert len(first) <= 60


def test_a_message_is_wrapped_for_the_stream_that_it_goes_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    print_message(PROSE, fg="red")
    print_message(PROSE, err=False)
    out, err = capsys.readouterr()
    assert out == f"{PROSE}\n"
    assert err.splitlines() == [f"\x1b[31m{FIRST} that\x1b[0m", "\x1b[31mit reads\x1b[0m"]


def test_a_file_gets_the_lines_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert wrap_lines(PROSE) == [PROSE]

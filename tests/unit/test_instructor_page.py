"""docs/instructor.md: every command that it shows is one, with options that it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from labctl.cli.groups import cli

PAGE = Path(__file__).parents[2] / "docs" / "instructor.md"
LINE = re.compile(r"^(?:\$ )?(labctl .*)$", re.MULTILINE)
WITHIN = re.compile(r"`(labctl [^`]*)`")
BLOCKS = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"-[a-zA-Z]$|--[a-z][a-z-]*$")


def shown() -> list[str]:
    text = PAGE.read_text()
    lines = [one for block in BLOCKS.findall(text) for one in LINE.findall(block)]
    lines += WITHIN.findall(BLOCKS.sub("", text))
    return sorted(
        {line.partition(" #")[0].strip() for line in lines} - {"labctl -C FOLDER course ..."}
    )


def found(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words name, and what follows it."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        within = command.get_command(click.Context(command), words[0])
        assert within is not None, f"there is no command {words[0]}"
        command, words = within, words[1:]
    return command, words


@pytest.mark.parametrize("line", shown())
def test_the_page_shows_commands_that_there_are(line: str) -> None:
    # Options of the groups come before the command.
    text = re.sub(r"(-C|--as) \S+ ", "", line.partition(" > ")[0])
    words = shlex.split(text)[1:]
    command, rest = found(words)
    mine = rest[: rest.index("--")] if "--" in rest else rest
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    assert {one for one in mine if OPTION.match(one)} <= known


def test_the_page_shows_every_command_of_a_course() -> None:
    course = cli.get_command(click.Context(cli), "course")
    assert isinstance(course, click.Group)
    names = {"roster", *course.list_commands(click.Context(course))} - {"door"}
    text = PAGE.read_text()
    assert [name for name in sorted(names) if f"course {name}" not in text] == []

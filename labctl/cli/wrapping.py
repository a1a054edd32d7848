"""Fit messages to the terminal: prose is wrapped at words, and what people paste stays whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap

import click

from labctl.cli.groups import COMMANDS

# Programs that labctl's messages tell people to type.
_PROGRAMS = (
    "aws|cd|chmod|curl|df|docker|eval|export|labctl|less|ls|mkdir|mv|pip|pipx|python|rm|ssh|"
    "ssh-copy-id|ssh-keygen|sudo|systemctl|unset|uv"
)
# A line that is a command or an option, or far enough to the right to have its own layout. A line
# such as "labctl needs the number of ...", or "--at: 'here' is not ...", is a sentence.
_SENTENCE = rf"labctl\s(?!-|(?:{'|'.join(COMMANDS)})\b)"
_FIXED = re.compile(rf"\t| {{4}}| *(?:--(?![\w-]+: )|(?!{_SENTENCE})(?:{_PROGRAMS}) )")
_START = re.compile(r" *(?:- )?")
# Parts of a sentence: code in backquotes, a command after a colon, and YAML in braces or brackets.
_WHOLE = re.compile(rf"`[^`]*`|(?<=: )(?:{_PROGRAMS}) [^;,]*|[\w.]+: (?:\{{.*\}}|\[.*\])")
# The space in "0.8 s" and "2 GiB".
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:s|min|h|d|B|[KMGT]i?B)\b)")
# columns of output that a program reads
UNLIMITED = 1_000_000
# A character of no message, in place of the spaces that must not become line breaks.
_JOINER = "\x1f"


def read_width() -> int:
    """Return the columns of the terminal that messages go to; 100 if it does not say."""
    columns = 0
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(OSError, ValueError):
            columns = columns or os.get_terminal_size(stream.fileno()).columns
    return shutil.get_terminal_size((columns or 100, 24)).columns


def read_output_width(most: int = 0) -> int:
    """Return the columns of the terminal that standard output goes to, or `most` if it has more.

    Without a terminal, it is what COLUMNS says, as `watch` sets it; else `UNLIMITED`, so that a
    program that reads the output gets whole lines.
    """
    columns = shutil.get_terminal_size((UNLIMITED, 24)).columns
    if columns == UNLIMITED and sys.stdout.isatty():
        columns = 100  # a terminal that does not know its size
    return min(columns, most) if most and columns != UNLIMITED else columns


def print_message(text: str, *, err: bool = True, fg: str | None = None) -> None:
    """Print sentences for people, wrapped to the terminal; `fg` is their color."""
    for line in wrap_lines(text, err=err):
        click.echo(click.style(line, fg=fg) if fg else line, err=err)


def indent_words(text: str, prefix: str) -> str:
    """Return a person's words with `prefix` before each line, wrapped to the terminal."""
    lines = wrap_lines(text, len(prefix), has_commands=False, err=False)
    return textwrap.indent("\n".join(lines), prefix)


def wrap_lines(
    text: str, indent: int = 0, *, has_commands: bool = True, err: bool = True
) -> list[str]:
    """Split a message into lines that fit the terminal, each below `indent` columns.

    Without a terminal these are the lines of the text. Commands, and lines that begin with four
    spaces, are not wrapped. Without `has_commands`, words such as `aws` name no program. Without
    `err`, the message goes to standard output.
    """
    lines = text.split("\n")
    if not (sys.stderr if err else sys.stdout).isatty():
        return lines
    width = max(read_width() - indent, 20)
    return [part for line in lines for part in _wrap_line(line, width, has_commands)]


def _wrap_line(line: str, width: int, has_commands: bool) -> list[str]:
    if len(line) <= width or (has_commands and _FIXED.match(line)):
        return [line]
    joined = _BEFORE_UNIT.sub(_JOINER, line)
    if has_commands:
        joined = _WHOLE.sub(lambda match: match[0].replace(" ", _JOINER), joined)
    start = _START.match(joined)
    assert start is not None  # it matches every line
    parts = textwrap.wrap(
        joined[start.end() :],
        width,
        initial_indent=start[0],
        subsequent_indent=" " * start.end(),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace(_JOINER, " ") for part in parts]

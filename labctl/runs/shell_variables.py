"""Notice that a run's command has a variable that no shell replaces, or the wrong one.

A run's command starts without a shell. In single quotes, the shell on this machine leaves
`$LABCTL_DATA_DIR` as it is, and the program in the container then looks for a file of that name.
Without quotes, it replaces `$LABCTL_DATA_DIR/birds` by `/birds`: it has no such variable.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from itertools import pairwise

# where a run has the data of its lab
DATA_DIRECTORY = "/lab/data"
_VARIABLE = re.compile(r"\$\{?LABCTL_[A-Z_]+\}?")
# The word after `sh -c`, `bash -lc` or `python -c` is a program.
_PROGRAM_OPTION = re.compile(r"-[a-z]*c")


def describe_literal_variable(command: Sequence[str]) -> str:
    """Return a warning if a word of the command contains a variable of runs; "" otherwise."""
    words = [
        word
        for before, word in pairwise(("", *command))
        if _VARIABLE.search(word) and not _PROGRAM_OPTION.fullmatch(before)
    ]
    if not words:
        return ""
    variable = _VARIABLE.search(words[0])
    assert variable
    line = " ".join(_quote_for_shell(word) for word in command)
    return (
        f"a run's command starts without a shell, so {variable[0]} stays as it is. To have it "
        f"replaced: labctl run -- sh -c {shlex.quote(line)}"
    )


def describe_replaced_variable(command: Sequence[str], data_names: Collection[str]) -> str:
    """Return a warning if a path of the command seems to lack its `$LABCTL_DATA_DIR`; else ""."""
    repaired = [_prepend_data_directory(word, data_names) for word in command]
    path = next((word for word, now in zip(command, repaired, strict=True) if word != now), "")
    if not path:
        return ""
    path = path.partition("=")[2] or path
    return (
        f"runs have their data at {DATA_DIRECTORY}, and the command reads {path}. If you typed "
        "$LABCTL_DATA_DIR, the shell of this machine has replaced it. To read the data of the lab: "
        f"labctl run -- {shlex.join(repaired)}"
    )


def _prepend_data_directory(word: str, data_names: Collection[str]) -> str:
    """Return a word such as `/birds/x` or `--data=/birds/x` with the path that it has in a run."""
    option, equals, value = word.rpartition("=")
    is_data = value.startswith("/") and value.split("/")[1] in data_names
    return f"{option}{equals}{DATA_DIRECTORY}{value}" if is_data else word


def _quote_for_shell(word: str) -> str:
    """Quote a word for a shell that is to replace the variables of runs in it."""
    if not _VARIABLE.search(word):
        return shlex.quote(word)
    return '"' + re.sub(r'(["`\\])', r"\\\1", word) + '"'

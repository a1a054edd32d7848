"""Notice that a run's command has a variable that no shell replaces.

A run's command starts without a shell. In single quotes, the shell on this machine leaves
`$LABCTL_DATA_DIR` as it is, and the program in the container then looks for a file of that name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import pairwise

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


def _quote_for_shell(word: str) -> str:
    """Quote a word for a shell that is to replace the variables of runs in it."""
    if not _VARIABLE.search(word):
        return shlex.quote(word)
    return '"' + re.sub(r'(["`\\])', r"\\\1", word) + '"'

"""The command as it was typed, with another name for the run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Sequence
from itertools import count
from typing import TYPE_CHECKING

from labctl.errors import NameTakenError

if TYPE_CHECKING:
    from labctl.lab import Lab

# the most characters of a run's name
_LONGEST = 39


def add_free_name(lab: Lab, name: str, error: NameTakenError) -> NameTakenError:
    """Return the error with the whole typed command as its next step, with a free name."""
    known = {run.id for run in lab.context.state.list_runs(lab.id)}
    free = choose_free_name(name, known)
    typed = replace_name(sys.argv[1:], name, free)
    hint = "\n".join(filter(None, [typed, error.hint]))
    return NameTakenError(error.what, why=error.why, hint=hint)


def choose_free_name(name: str, known: Collection[str]) -> str:
    """Return `name` with the first number from 2 that makes it a name that is not known."""
    names = (f"{name[: _LONGEST - 1 - len(str(at))]}-{at}" for at in count(2))
    return next(free for free in names if free not in known)


def replace_name(words: Sequence[str], name: str, other: str) -> str:
    """Return the command line with `--id other` instead of `--id name`; "" if it has none."""
    own = list(words).index("--") if "--" in words else len(words)
    changed = list(words)
    for at, word in enumerate(words[:own]):
        if word == f"--id={name}":
            changed[at] = f"--id={other}"
        elif word == name and at and words[at - 1] == "--id":
            changed[at] = other
    return shlex.join(["labctl", *changed]) if changed != list(words) else ""

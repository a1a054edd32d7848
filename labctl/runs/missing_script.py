"""Notice on this machine that a run's script is not in the lab's code, or has no interpreter.

It is a warning and no error: a file that somebody created on the server is in the run's code too.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path, PurePosixPath

from labctl.wire.containment import is_contained

_INTERPRETER = re.compile(r"python[\d.]*|bash|sh")
# Options without a value. After any other option, the next word may be no script.
_PLAIN_OPTION = re.compile(r"-[BdEIOPqSuvex]+")
INTERPRETERS = {".py": "python", ".sh": "sh"}
_SUFFIXES = tuple(INTERPRETERS)
# least similarity of a misspelled path to the one that labctl suggests
_SIMILAR = 0.6


def describe_missing_script(root: Path, command: Sequence[str]) -> str:
    """Return a warning if the command runs a script that is not in the lab; "" otherwise."""
    script = _find_script(command)
    if not script or os.path.lexists(root / script):
        return ""
    near = _find_similar(root, script)
    if near:
        return f"there is no {script} in this lab; did you mean {near}?"
    return f"there is no {script} in this lab; the run finds it only if it is on the server"


def describe_script_as_program(root: Path, command: Sequence[str]) -> str:
    """Return a warning if the command is a script of the lab without its interpreter, or "".

    A program is looked up in PATH, where no run has its code. `./train.py` may be executable.
    """
    completed = add_interpreter(command)
    if completed == tuple(command) or not (root / command[0]).is_file():
        return ""
    run = shlex.join(("labctl", "run", "--", *completed))
    return f"{command[0]} is a file of this lab and no program; did you mean: {run}"


def add_interpreter(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command, after its interpreter if it begins with a script such as train.py."""
    script = command[0] if command else ""
    interpreter = INTERPRETERS.get(PurePosixPath(script).suffix)
    return (interpreter, *command) if interpreter and "/" not in script else tuple(command)


def list_scripts(root: Path) -> frozenset[str]:
    """List the names of the scripts beside lab.yaml."""
    return frozenset(path.name for path in root.iterdir() if path.suffix in INTERPRETERS)


def _find_script(command: Sequence[str]) -> str:
    """Return the relative path of the script that an interpreter is to run; "" if unsure."""
    program, *words = command or ("",)
    if not _INTERPRETER.fullmatch(program.rpartition("/")[2]):
        return ""
    script = next((word for word in words if not _PLAIN_OPTION.fullmatch(word)), "")
    path = os.path.normpath(script)
    return path if script.endswith(_SUFFIXES) and is_contained(path) else ""


def _find_similar(root: Path, script: str) -> str:
    """Return a script of the lab with that name in another directory, or with a similar path."""
    path = PurePosixPath(script)
    scripts = sorted(
        file.relative_to(root).as_posix()
        for pattern in (f"*{path.suffix}", f"*/*{path.suffix}", f"{path.parent}/*{path.suffix}")
        for file in root.glob(pattern)
    )
    for file in scripts:
        if PurePosixPath(file).name == path.name:
            return file
    return next(iter(get_close_matches(script, scripts, n=1, cutoff=_SIMILAR)), "")

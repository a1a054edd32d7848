"""A Python program of the lab, run on this machine: its result, or why it failed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from labctl.config import copy_environment
from labctl.errors import LabError
from labctl.runs.script_imports import explain_usage_error

# The end of a traceback; what libraries print before it would only hide it.
SHOWN_LINES = 15
SHOWN_CHARACTERS = 1500
# the last line of a failed import, by its top-level package
_MISSING_PACKAGE = re.compile(r"^ModuleNotFoundError: No module named '(\w+)[^']*'\Z", re.MULTILINE)
Result = TypeVar("Result")


def run_lab_script(
    words: Sequence[str],
    directory: Path,
    parse: Callable[[str], Result],
    *,
    fix: str,
    suggest_install: Callable[[str], str],
    variables: Mapping[str, str] | None = None,
) -> Result:
    """Run a program with labctl's Python and parse the last line that it prints.

    `words` are the program and its arguments. `parse` raises ValueError for a line that is not the
    result, and says what is missing. LabError then, with the program's output and the next command:
    `fix`, or `suggest_install` of a package that could not be imported.
    """
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env={**copy_environment(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    name, lines = Path(words[0]).name, done.stdout.strip().splitlines()
    try:
        return parse(lines[-1] if lines else "")
    except ValueError as error:
        output_lines = (done.stderr or done.stdout).strip().splitlines()[-SHOWN_LINES:]
        output = "\n".join(output_lines)[-SHOWN_CHARACTERS:]
        if match := _MISSING_PACKAGE.search(output):
            raise LabError(
                f"{name} needs {match[1]}, which labctl's Python environment lacks",
                why=f"{name} runs with {sys.executable}",
                hint=suggest_install(match[1]),
            ) from None
        raise LabError(
            f"{name} failed with exit code {done.returncode}"
            if done.returncode
            else f"{name} printed {error}",
            why="\n".join(
                filter(None, [explain_usage_error(directory / words[0], output), output])
            ),
            hint=fix,
        ) from None

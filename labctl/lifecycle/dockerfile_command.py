"""The command of a project's Dockerfile, if it is plain enough to repeat in lab.yaml."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from labctl.lifecycle.project_imports import read_source

INSTRUCTION = re.compile(r"^\s*(FROM|ENTRYPOINT|CMD)\s+(.*\S)\s*$", re.IGNORECASE | re.MULTILINE)
PYTHON = re.compile(r"python[\d.]*")
# what only a shell understands, and a line that continues
SHELL_SYNTAX = re.compile(r"[$&|;<>*`\\]")


def read_dockerfile_command(root: Path) -> tuple[str, ...]:
    """Return the CMD of the image if it runs Python code of the project; () otherwise.

    With an ENTRYPOINT, CMD is only a part of the command.
    """
    command = ""
    for keyword, text in INSTRUCTION.findall(read_source(root / "Dockerfile")):
        if keyword.upper() == "ENTRYPOINT":
            return ()
        command = text if keyword.upper() == "CMD" else ""
    words = _split_words(command)
    is_project_code = any((root / word).is_file() for word in words[1:]) or "-m" in words[1:2]
    return words if words and PYTHON.fullmatch(words[0]) and is_project_code else ()


def _split_words(command: str) -> tuple[str, ...]:
    try:
        if not command.startswith("["):
            return () if SHELL_SYNTAX.search(command) else tuple(shlex.split(command))
        words = json.loads(command)
    except ValueError:
        return ()
    return tuple(words) if all(isinstance(word, str) for word in words) else ()

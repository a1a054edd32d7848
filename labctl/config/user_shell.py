"""The user's shell: which one it is, its startup file, and its requests for completions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath

# click's protocol: a shell that wants completions calls labctl without arguments and sets it.
COMPLETE_VARIABLE = "_LABCTL_COMPLETE"


def is_completion_request() -> bool:
    """Whether a shell has started this process to complete a command line."""
    return os.environ.get(COMPLETE_VARIABLE, "").endswith("_complete")


def find_shell_name(environ: Mapping[str, str]) -> str:
    """Return the name of the user's login shell, such as "zsh"; "" if it is not known."""
    return PurePath(environ.get("SHELL", "")).name


def find_startup_file(shell: str, environ: Mapping[str, str]) -> Path:
    """Return the file that each interactive bash or zsh of the user reads."""
    home = Path(environ.get("HOME") or Path.home())
    if shell == "zsh":
        return Path(environ.get("ZDOTDIR") or home) / ".zshrc"
    return home / ".bashrc"


def find_fish_completions(environ: Mapping[str, str]) -> Path:
    """Return the directory in which fish finds the completions of a command by its name."""
    home = Path(environ.get("HOME") or Path.home())
    config = environ.get("XDG_CONFIG_HOME", "")
    base = Path(config) if config.startswith("/") else home / ".config"
    return base / "fish" / "completions"

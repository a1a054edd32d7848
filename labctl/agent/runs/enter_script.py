"""The script that runs a command in the environment of an attempt without a container."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..host.paths import labctl_home
from .environments import list_code_paths
from .executor import Environment, NewAttempt
from .gang import build_member_env

ENTER = "enter.sh"


def build_enter_script(attempt_directory: Path, attempt: NewAttempt, own: dict[str, str]) -> str:
    """Return the script. `own` are variables that the executor adds."""
    spec, run = attempt.spec, attempt.directory
    variables = {
        "LABCTL_RUN_ID": spec.id,
        "LABCTL_DATA_DIR": str(attempt.root / "data"),
        "LABCTL_RUN_DIR": str(run),
        "LABCTL_CHECKPOINT_DIR": str(run / "checkpoints"),
        "LABCTL_LOG_DIR": str(run / "logs"),
        "LABCTL_CACHE_DIR": str(labctl_home() / ".cache"),
        "PYTHONUNBUFFERED": "1",
        **build_member_env(attempt.member),
        **spec.env,
        "LABCTL_ATTEMPT": str(attempt_directory),
        **own,
    }
    lines = build_variable_lines(variables)
    assert isinstance(attempt.image, Environment)
    lines += build_environment_lines(attempt.image, run / "code")
    entry = shlex.quote(str(run / ".labctl" / "entry.sh"))
    code = shlex.quote(str(run / "code"))
    return "\n".join(["#!/bin/sh", *lines, f"cd {code} || exit 125", f'exec sh {entry} "$@"', ""])


def build_variable_lines(variables: dict[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]


def build_environment_lines(environment: Environment, code: Path) -> list[str]:
    """Return the lines that put the programs and packages of an environment before the server's."""
    if environment.directory is None:
        return []
    prefix = shlex.quote(str(environment.directory / "env"))
    lines = [
        f'export PATH={prefix}/bin:"$PATH" VIRTUAL_ENV={prefix} CONDA_PREFIX={prefix}',
        "export PYTHONNOUSERSITE=1",
    ]
    paths = list_code_paths(environment, code)
    if paths:
        own = shlex.quote(":".join(paths))
        lines.append(f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{own}')
    return lines

"""The executors of a server, by the name that a run's specification has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...wire.runs import DOCKER, PROCESS, SLURM
from ..reply import Failure
from .docker_executor import DockerExecutor
from .executor import Executor, ProgramState
from .process_executor import ProcessExecutor
from .records import read_final_record, read_last_attempt
from .slurm_executor import SlurmExecutor
from .spec import read_spec


def get_executor(name: str) -> Executor:
    """Return an executor. Failure (usage) for an unknown name."""
    if name == DOCKER:
        return DockerExecutor()
    if name == PROCESS:
        return ProcessExecutor()
    if name == SLURM:
        return SlurmExecutor()
    raise Failure("usage", f"the agent on the server has no executor {name!r}", "", "labctl doctor")


def inspect_unended(directories: Sequence[Path]) -> dict[str, ProgramState]:
    """Inspect the last attempt of every run that is not known to have ended, by its name."""
    names: dict[str, list[str]] = {}
    for directory in directories:
        attempt = read_last_attempt(directory).container
        if attempt and not read_final_record(directory):
            names.setdefault(read_spec(directory).executor, []).append(attempt)
    programs: dict[str, ProgramState] = {}
    for executor, attempts in names.items():
        programs.update(get_executor(executor).inspect(attempts))
    return programs

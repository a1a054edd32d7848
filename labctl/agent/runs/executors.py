"""The executors of a server, by the name that a run's specification has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...wire.runs import DOCKER, PROCESS
from ..reply import Failure
from .docker_executor import DockerExecutor
from .executor import Execution, Executor, LiveAttempt
from .records import read_final_record, read_last_attempt
from .spec import read_spec


def get_executor(name: str) -> Executor:
    """Return an executor. Failure (usage) for an unknown name."""
    if name == DOCKER:
        return DockerExecutor()
    if name == PROCESS:
        from .process_executor import ProcessExecutor  # most runs are containers

        return ProcessExecutor()
    raise Failure("usage", f"the agent on the server has no executor {name!r}", "", "labctl doctor")


def list_live(lab_id: str = "") -> list[LiveAttempt]:
    """List the attempts that run on this server, of one lab or of all."""
    import shutil  # a run's start does not need it

    docker = get_executor(DOCKER).list_live(lab_id) if shutil.which("docker") else []
    return [*docker, *get_executor(PROCESS).list_live(lab_id)]


def inspect_unended(directories: Sequence[Path]) -> dict[str, Execution]:
    """Inspect the last attempt of every run that is not known to have ended, by its name."""
    names: dict[str, list[str]] = {}
    for directory in directories:
        attempt = read_last_attempt(directory).container
        if attempt and not read_final_record(directory):
            names.setdefault(read_spec(directory).executor, []).append(attempt)
    executions: dict[str, Execution] = {}
    for executor, attempts in names.items():
        executions.update(get_executor(executor).inspect(attempts))
    return executions

"""Remove what a lab's runs leave on a server that somebody else may use next."""

from __future__ import annotations

from ...wire.runs import DOCKER, ClearRunsReply
from ...wire.verbs import LabRequest
from ..host import engine
from ..host.docker import run_tmux
from ..host.paths import lab_dir
from ..sandbox.evaluation import name_container
from .environment_builds import release_environments
from .executors import get_executor
from .records import read_final_record, read_last_attempt
from .spec import read_spec


def clear(request: LabRequest) -> ClearRunsReply:
    """Remove the containers and sessions of runs that have ended, and the lab's environments.

    The runs' files stay, and environments that another lab uses.
    """
    root = lab_dir(request.lab, request.lab_id)
    cleared = []
    for directory in sorted((root / "runs").glob("*")):
        if not directory.name.startswith(".") and read_final_record(directory):
            executor = read_spec(directory).executor
            attempt = read_last_attempt(directory).container
            if attempt:
                get_executor(executor).remove(attempt)
            if executor == DOCKER:
                engine.remove_container(name_container(root, directory.name))
            run_tmux("kill-session", "-t", f"=labctl-{directory.name}")
            cleared.append(directory.name)
    release_environments(request.lab_id)
    return ClearRunsReply(tuple(cleared))

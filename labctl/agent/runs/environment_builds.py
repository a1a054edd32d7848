"""Build environments for runs without containers, by a shell script of the client."""

from __future__ import annotations

import os
from pathlib import Path

from ...wire.images import BuildEnvironmentRequest, BuildOpening, BuildResult
from ..host.paths import drop_tree, lab_dir, labctl_home, require_name, run_dir, write_text
from ..reply import send_closing_reply, send_reply
from .environments import LABS, WHOLE, add_lab, environments_root, find_directory
from .images import lock_build, pick_failing_lines, run_and_tee, write_code

_BUILD = '[ -z "$MODULES" ] || module load $MODULES && cd "$1" && exec sh ../build.sh'


def build(request: BuildEnvironmentRequest) -> None:
    """Build an environment, unless it is here; stream and log the output of its script."""
    directory = find_directory(request.reference)
    lab = lab_dir(request.lab, request.lab_id)
    source = run_dir(lab, request.run) / "code" if request.run else lab / "code"
    log = lab / "builds" / f"environment-{directory.name}.log"
    log.parent.mkdir(exist_ok=True)
    send_reply(BuildOpening(str(log)))
    with lock_build(f"environment-{directory.name}"):
        if (directory / WHOLE).exists():
            add_lab(directory, request.lab_id)
            send_closing_reply(BuildResult(0, (), str(log)))
            return
        _clear_directory(directory)
        add_lab(directory, request.lab_id)
        code = directory / "code"
        write_code(code, source, request.files, has_code=request.has_code)
        write_text(directory / "build.sh", request.script)
        words = [*_choose_shell(request), "-c", _BUILD, "sh", str(code)]
        exit_code, lines = run_and_tee(words, log, _build_variables(request, directory))
        if exit_code == 0:
            (directory / WHOLE).touch()
        else:
            drop_tree(directory)
    send_closing_reply(BuildResult(exit_code, tuple(pick_failing_lines(lines)), str(log)))


def release_environments(lab_id: str) -> None:
    """Remove the environments that no lab but this one uses."""
    for mark in environments_root().glob(f"*/{LABS}/{require_name(lab_id)}"):
        directory = mark.parent.parent
        with lock_build(f"environment-{directory.name}"):
            mark.unlink()
            if any(mark.parent.iterdir()):
                continue
            # A run that starts meanwhile marks the environment first, and then looks for this file.
            whole = directory / WHOLE
            is_whole = whole.exists()
            if is_whole:
                whole.unlink()
            if not any(mark.parent.iterdir()):
                drop_tree(directory)
            elif is_whole:
                whole.touch()


def _choose_shell(request: BuildEnvironmentRequest) -> list[str]:
    """Return the shell of a build. On a cluster with modules, `module` is one of login shells."""
    return ["bash", "-l"] if request.args.get("MODULES") else ["sh"]


def _clear_directory(directory: Path) -> None:
    """Create the directory, without what a build that was killed left in it."""
    drop_tree(directory)
    (directory / LABS).mkdir(mode=0o700, parents=True)


def _build_variables(request: BuildEnvironmentRequest, directory: Path) -> dict[str, str]:
    variables = {
        **os.environ,
        **request.args,
        "ENVIRONMENT": str(directory / "env"),
        "TOOLS": str(labctl_home() / ".tools"),
    }
    wheelhouse = labctl_home() / ".wheelhouse"
    if request.wheelhouse and wheelhouse.is_dir():
        variables.update(PIP_FIND_LINKS=str(wheelhouse), PIP_NO_INDEX="1")
    return variables

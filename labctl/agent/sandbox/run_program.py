"""A Python program on a run's files, in the run's image: evaluations, and public tests.

The container has the run, the code and the data read-only, no network, no secrets and no
capabilities. It can write only to a directory of its own, and to a small /tmp.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ...wire.runs import RunSpec
from ..host import engine
from ..host.engine_objects import Image, NewContainer
from ..reply import Failure
from ..runs.containers import (
    ContainerLab,
    ResourceLimits,
    build_lab_container,
    build_mount,
    build_run_env,
    limit,
    restrict,
)
from ..runs.records import read_last_attempt

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
# The program may be in another directory than the code that it imports.
PYTHON = """\
export PYTHONPATH="/lab/code${PYTHONPATH:+:$PYTHONPATH}"
command -v python >/dev/null && exec python "$@"; exec python3 "$@"
"""


def find_run_image(directory: Path, spec: RunSpec) -> Image | None:
    """Return the image that the run used, else the one that it names; None without both."""
    image_id = read_last_attempt(directory).image_id
    used_image = engine.inspect_image(image_id) if image_id else None
    return used_image or engine.inspect_image(spec.image)


def build_program_container(
    root: Path,
    directory: Path,
    spec: RunSpec,
    image: Image,
    *,
    code: Path,
    output: tuple[Path, str],
    env: dict[str, str],
    label: str,
    words: tuple[str, ...],
) -> NewContainer:
    """Return the container for Python with the arguments `words`, in the directory `code`.

    `output` is the only writable directory on the server, and its path in the container.
    """
    output_directory, output_target = output
    mounts = [
        build_mount(code, "/lab/code", read_only=True),
        build_mount(directory, "/lab/run", read_only=True),
        build_mount(output_directory, output_target),
    ]
    # HOME is a temporary directory for programs that write there.
    variables = {**build_run_env(spec.id), **spec.env, "HOME": "/tmp", **env}
    lab = ContainerLab(spec.lab, spec.lab_id, spec.gpus, spec.data)
    container = build_lab_container(root, lab, image, mounts, variables, {label: spec.id})
    limits = ResourceLimits(spec.memory_bytes, spec.cpus, spec.shm_bytes)
    config = restrict(limit(container.HostConfig, limits), {"/tmp": "mode=1777"})
    config = config._replace(
        Mounts=tuple(
            mount._replace(ReadOnly=mount.Target != output_target) for mount in config.Mounts
        )
    )
    line = ("/bin/sh", "-c", PYTHON, "labctl", *words)
    if image.config.Entrypoint:
        return container._replace(Cmd=line, HostConfig=config)
    return container._replace(Entrypoint=line[:1], Cmd=line[1:], HostConfig=config)


def wait_for_exit(name: str, deadline_s: float, what: str, hint: str) -> int:
    """Wait for the container's exit code. Failure after `deadline_s`, with `what` and `hint`."""
    deadline, pause_s = time.monotonic() + deadline_s, FIRST_PAUSE_S
    while True:
        inspected = engine.inspect_container(name)
        if inspected is None:
            raise Failure("docker", f"the {what}'s container was removed while it ran")
        if not inspected.State.Running:
            return inspected.State.ExitCode
        if time.monotonic() > deadline:
            text = f"the {what} did not finish within {deadline_s:g} s and was stopped"
            raise Failure("docker", text, "", hint)
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 2)


def read_output(path: Path, most_bytes: int) -> bytes | None:
    """Return a file that a program wrote, at most one byte more than `most_bytes`.

    None if it is missing. Never follows a link.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most_bytes + 1)

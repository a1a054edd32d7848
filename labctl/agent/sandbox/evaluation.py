"""Evaluation on the server: the run's own evaluate.py on its checkpoints, in a sandbox.

A checkpoint may be a pickle, which runs code when it is loaded. So the container has the run, its
code and the data read-only, no network, no secrets and no capabilities. It can write only to a
directory of its own, which is removed afterwards, and to a small /tmp.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from ...wire.checkpoints import fingerprint_checkpoints
from ...wire.runs import RunSpec
from ...wire.sandbox import EvaluateReply, EvaluateRequest
from ..host import engine
from ..host.docker import run_docker
from ..host.engine_objects import Image, NewContainer
from ..host.paths import drop_tree, lab_dir, resolve_inside
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
from ..runs.run_state import require_run_directory
from ..runs.spec import read_spec

PROGRAM = "evaluate.py"
CHECKPOINTS = "checkpoints"
OUT = "evaluation.json"
OUT_DIRECTORY = "/lab/evaluation"
LONGEST_S = 3600.0
LARGEST_BYTES = 32 * 1024 * 1024
OUTPUT_LINES = "60"
LONGEST_LINE = 6000
# An evaluation has four levels. Converting a value of a thousand would end this process.
MOST_LEVELS = 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
# A program that came with the request is in another directory than the code that it imports.
PYTHON = """\
export PYTHONPATH="/lab/code${PYTHONPATH:+:$PYTHONPATH}"
command -v python >/dev/null && exec python "$@"; exec python3 "$@"
"""


def evaluate(request: EvaluateRequest) -> EvaluateReply:
    """Evaluate a run's checkpoint, or all of its checkpoints.

    Failure after the request's deadline. Concurrent evaluations of one run wait for each other.
    """
    directory = require_run_directory(request.lab, request.lab_id, request.run)
    spec = read_spec(directory)._replace(gpus=request.gpus)
    has_own_program = (directory / "code" / PROGRAM).is_file()
    if not has_own_program and not request.program:
        return EvaluateReply(lacks="program")
    checkpoint = request.checkpoint or CHECKPOINTS
    if not _has_files(resolve_inside(directory, checkpoint)):
        if checkpoint == CHECKPOINTS:
            return EvaluateReply(lacks=CHECKPOINTS)
        what = f"run {directory.name} has no {checkpoint} on this server"
        raise Failure("missing", what, "", f"labctl eval --on-server {directory.name}")
    image_id = read_last_attempt(directory).image_id
    image = (engine.inspect_image(image_id) if image_id else None) or engine.inspect_image(
        spec.image
    )
    if image is None:
        return EvaluateReply(missing=spec.image)
    with (directory / ".labctl" / "evaluation.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root = lab_dir(request.lab, request.lab_id)
        sent = request._replace(
            checkpoint=checkpoint,
            deadline_s=request.deadline_s or LONGEST_S,
            program="" if has_own_program else request.program,
        )
        return _run_evaluation(root, directory, spec, image, sent)


def _has_files(place: Path) -> bool:
    """Whether a file is at any depth in `place`; links are not followed."""
    return any(names for _, _, names in os.walk(place))


def name_container(root: Path, run: str) -> str:
    return f"{root.name}-eval-{run}"


def _run_evaluation(
    root: Path, directory: Path, spec: RunSpec, image: Image, request: EvaluateRequest
) -> EvaluateReply:
    name = name_container(root, directory.name)
    output_directory = directory / ".labctl" / f"evaluation-{os.urandom(4).hex()}"
    output_directory.mkdir()
    fingerprints = fingerprint_checkpoints(directory / CHECKPOINTS)
    engine.remove_container(name)  # left behind by a killed call
    try:
        if request.program:
            (output_directory / PROGRAM).write_text(request.program)
        engine.create_container(
            name,
            build_evaluation_container(root, directory, spec, image, request, output_directory),
        )
        engine.start_container(name)
        code = _wait_for_exit(name, request.deadline_s)
        done = run_docker("logs", "--tail", OUTPUT_LINES, name, check=False)
        return EvaluateReply(
            code,
            (done.stdout + done.stderr)[-6000:],
            _read_result(output_directory / OUT),
            last_line=_last_line(done.stdout),
            used_program=bool(request.program),
            checkpoint_fingerprints=fingerprints,
        )
    finally:
        engine.remove_container(name)
        drop_tree(output_directory)


def build_evaluation_container(
    root: Path,
    directory: Path,
    spec: RunSpec,
    image: Image,
    request: EvaluateRequest,
    output_directory: Path,
) -> NewContainer:
    mounts = [
        build_mount(directory / "code", "/lab/code", read_only=True),
        build_mount(directory, "/lab/run", read_only=True),
        build_mount(output_directory, OUT_DIRECTORY),
    ]
    # HOME is a temporary directory for programs that write there.
    env = {
        **build_run_env(spec.id),
        **spec.env,
        "HOME": "/tmp",
        "LABCTL_EVALUATION": f"{OUT_DIRECTORY}/{OUT}",
    }
    labels = {"labctl.runs.evaluation": spec.id}
    lab = ContainerLab(spec.lab, spec.lab_id, spec.gpus, spec.data)
    container = build_lab_container(root, lab, image, mounts, env, labels)
    limits = ResourceLimits(spec.memory_bytes, spec.cpus, spec.shm_bytes)
    config = restrict(limit(container.HostConfig, limits), {"/tmp": "mode=1777"})
    config = config._replace(
        Mounts=tuple(
            mount._replace(ReadOnly=mount.Target != OUT_DIRECTORY) for mount in config.Mounts
        )
    )
    program = f"{OUT_DIRECTORY}/{PROGRAM}" if request.program else PROGRAM
    words = ("/bin/sh", "-c", PYTHON, "evaluate", program, f"/lab/run/{request.checkpoint}")
    if image.config.Entrypoint:
        return container._replace(Cmd=words, HostConfig=config)
    return container._replace(Entrypoint=words[:1], Cmd=words[1:], HostConfig=config)


def _wait_for_exit(name: str, deadline_s: float) -> int:
    """Wait for the container's exit code. Failure after `deadline_s`."""
    deadline, pause_s = time.monotonic() + deadline_s, FIRST_PAUSE_S
    while True:
        inspected = engine.inspect_container(name)
        if inspected is None:
            raise Failure("docker", "the evaluation's container was removed while it ran")
        if not inspected.State.Running:
            return inspected.State.ExitCode
        if time.monotonic() > deadline:
            what = f"the evaluation did not finish within {deadline_s:g} s and was stopped"
            raise Failure("docker", what, "", "labctl eval --on-server --time-limit 4h")
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 2)


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:LONGEST_LINE] if lines else ""


def _read_result(path: Path) -> object:
    """Return the program's result; None if it is not JSON. Never follows a link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(LARGEST_BYTES + 1)
    if len(text) > LARGEST_BYTES:
        raise Failure("usage", f"{PROGRAM} wrote more than {LARGEST_BYTES >> 20} MiB")
    try:
        result: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if _is_deeper(result, MOST_LEVELS) else result


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether lists and objects in `value` are nested in more than this many levels."""
    if not isinstance(value, (list, dict)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(item, levels - 1) for item in items)

"""Evaluation on the server: the run's own evaluate.py on its checkpoints, in a sandbox.

A checkpoint may be a pickle, which runs code when it is loaded. So the container has the run, its
code and the data read-only, no network, no secrets and no capabilities. It can write only to a
directory of its own, which is removed afterwards, and to a small /tmp.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from ...wire.checkpoints import fingerprint_checkpoints
from ...wire.runs import RunSpec
from ...wire.sandbox import EvaluateReply, EvaluateRequest
from ..host import engine
from ..host.docker import run_docker
from ..host.engine_objects import Image, NewContainer
from ..host.paths import drop_tree, lab_dir, resolve_inside
from ..reply import Failure
from ..runs.run_state import require_run_directory
from ..runs.spec import read_spec
from .run_program import build_program_container, find_run_image, read_output, wait_for_exit

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
    image = find_run_image(directory, spec)
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
        code = wait_for_exit(
            name, request.deadline_s, "evaluation", "labctl eval --on-server --time-limit 4h"
        )
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
    program = f"{OUT_DIRECTORY}/{PROGRAM}" if request.program else PROGRAM
    return build_program_container(
        root,
        directory,
        spec,
        image,
        code=directory / "code",
        output=(output_directory, OUT_DIRECTORY),
        env={"LABCTL_EVALUATION": f"{OUT_DIRECTORY}/{OUT}"},
        label="labctl.runs.evaluation",
        words=(program, f"/lab/run/{request.checkpoint}"),
    )


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:LONGEST_LINE] if lines else ""


def _read_result(path: Path) -> object:
    """Return the program's result; None if it is not JSON."""
    text = read_output(path, LARGEST_BYTES)
    if text is None:
        return None
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

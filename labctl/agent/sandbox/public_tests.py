"""The public tests of an assignment on the server: pytest on the pushed code, in a sandbox.

The tests run in the image of a run, and can read its checkpoints and logs.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ...wire.runs import RunSpec
from ...wire.sandbox import CheckReply, CheckRequest
from ..host import engine
from ..host.docker import run_docker
from ..host.engine_objects import Image
from ..host.paths import drop_tree, lab_dir, resolve_inside
from ..reply import Failure
from ..runs.run_state import require_run_directory
from ..runs.spec import read_spec
from .run_program import build_program_container, find_run_image, read_output, wait_for_exit

OUT_DIRECTORY, RESULTS = "/lab/check", "results.xml"
LONGEST_S = 600.0
LARGEST_BYTES = 4 * 1024 * 1024
OUTPUT_LINES = "60"
# A pytest.ini of the lab is not used: results must not depend on it.
OPTIONS = (
    "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", "/lab/code", "-p", "no:cacheprovider",
    "-o", "junit_family=xunit1", "-o", "markers=points",
    f"--junitxml={OUT_DIRECTORY}/{RESULTS}", "--",
)  # fmt: skip


def check(request: CheckRequest) -> CheckReply:
    """Run the tests. Failure after the deadline. Checks of one run wait for each other."""
    directory = require_run_directory(request.lab, request.lab_id, request.run)
    root = lab_dir(request.lab, request.lab_id)
    code = root / "code"
    for path in request.tests:
        resolve_inside(code, path)
    if not code.is_dir():
        raise Failure("missing", "this lab has no pushed code on this server", "", "labctl push")
    spec = read_spec(directory)._replace(gpus=request.gpus)
    image = find_run_image(directory, spec)
    if image is None:
        return CheckReply(missing=spec.image)
    with (directory / ".labctl" / "check.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _run_tests(root, directory, spec, image, request)


def _run_tests(
    root: Path, directory: Path, spec: RunSpec, image: Image, request: CheckRequest
) -> CheckReply:
    name = f"{root.name}-check-{directory.name}"
    output_directory = directory / ".labctl" / f"check-{os.urandom(4).hex()}"
    output_directory.mkdir()
    engine.remove_container(name)  # left behind by a killed call
    try:
        container = build_program_container(
            root,
            directory,
            spec,
            image,
            code=root / "code",
            output=(output_directory, OUT_DIRECTORY),
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            label="labctl.runs.check",
            words=(*OPTIONS, *request.tests),
        )
        engine.create_container(name, container)
        engine.start_container(name)
        deadline_s = request.deadline_s or LONGEST_S
        hint = "labctl check --on-server --time-limit 1h"
        code = wait_for_exit(name, deadline_s, "check", hint)
        done = run_docker("logs", "--tail", OUTPUT_LINES, name, check=False)
        results = read_output(output_directory / RESULTS, LARGEST_BYTES) or b""
        text = "" if len(results) > LARGEST_BYTES else results.decode("utf-8", "replace")
        return CheckReply(code, (done.stdout + done.stderr)[-6000:], text)
    finally:
        engine.remove_container(name)
        drop_tree(output_directory)

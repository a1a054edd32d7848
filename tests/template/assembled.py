"""A project that `labctl init --template` writes from several directories, and its programs."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from template_project import REPOSITORY

from labctl.lifecycle.sample_project import copy_template

# TensorFlow and JAX compile for a minute on a busy machine.
PATIENCE_S = 900.0


def assemble(template: str, target: Path) -> Path:
    """Write the template's files to a new directory."""
    target.mkdir()
    copy_template(REPOSITORY / "templates", template, target)
    return target


@functools.cache
def assemble_once(template: str) -> Path:
    """Return the directory of a template's files, which this process removes at its end."""
    top = Path(tempfile.mkdtemp(prefix=f"{template}-"))
    atexit.register(shutil.rmtree, top, ignore_errors=True)
    return assemble(template, top / "project")


def start(project: Path, program: str, *arguments: str, run: Path) -> subprocess.Popen[str]:
    """Start a program as labctl's container would; a warning ends it."""
    run.mkdir(exist_ok=True)
    environ = {key: value for key, value in os.environ.items() if key[:7] != "LABCTL_"}
    environ |= {"LABCTL_RUN_DIR": str(run), "LABCTL_RUN_ID": "run-1", "SEED": "1"}
    return subprocess.Popen(
        [sys.executable, "-B", "-W", "error", str(project / program), *arguments],
        cwd=run,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], exit_code: int = 0) -> str:
    """Wait for a program and return its output; it must end with `exit_code`."""
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == exit_code, output
    return output


def train(project: Path, *arguments: str, run: Path) -> str:
    """Train to the end and return the output."""
    return finish(start(project, "train.py", *arguments, run=run))


def stop_after(project: Path, step: int, *arguments: str, run: Path) -> str:
    """Send SIGTERM once a checkpoint of `step` or later is there; return the output."""
    process = start(project, "train.py", *arguments, run=run)
    give_up = time.monotonic() + PATIENCE_S
    while not any(int(p.name[5:]) >= step for p in (run / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < give_up
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    return finish(process, 143)


def read_newest(run: Path) -> dict[str, bytes]:
    """Return the files of the newest checkpoint that the training determines."""
    newest = max((run / "checkpoints").glob("step-*"))
    names = [p.name for p in newest.iterdir() if p.name not in ("manifest.json", "state.json")]
    return {name: (newest / name).read_bytes() for name in names}

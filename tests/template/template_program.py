"""Programs of a template, run in a directory as labctl's container runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from assembled import assemble_once

# seconds for a training on a busy machine
PATIENCE_S = 900.0


def start(
    template: str, program: str, *arguments: str, run: Path, warnings_are_errors: bool = True
) -> subprocess.Popen[str]:
    """Start a program of the template. A warning ends it, unless its libraries give some."""
    run.mkdir(exist_ok=True)
    environ = {key: value for key, value in os.environ.items() if key[:7] != "LABCTL_"}
    environ |= {"LABCTL_RUN_DIR": str(run), "LABCTL_RUN_ID": "run-1", "SEED": "1"}
    return subprocess.Popen(
        [sys.executable, "-B", str(assemble_once(template) / program), *arguments],
        cwd=run,
        env=environ | ({"PYTHONWARNINGS": "error"} if warnings_are_errors else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], exit_code: int = 0) -> str:
    """Wait for a program and return its output; it must end with `exit_code`."""
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == exit_code, output
    return output


def wait_for_step(training: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until the training has written this step, or a later one, to progress.json."""
    give_up = time.monotonic() + PATIENCE_S
    while read_json(run, "progress").get("step", 0) < step:
        assert training.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.01)


def read_json(run: Path, name: str) -> dict[str, Any]:
    """Return what logs/NAME.json holds; nothing before it is written."""
    file = run / "logs" / f"{name}.json"
    values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return values

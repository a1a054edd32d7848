"""The sample project under test: importable, and run as its users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TEMPLATE = REPOSITORY / "templates" / "image-classifier"
sys.path.insert(0, str(TEMPLATE))


def start(
    program: str, *arguments: str, run: Path, data: Path | None = None
) -> subprocess.Popen[str]:
    """Start a program of the project in the directory `run`, as labctl's container would.

    `data` is a dataset, in a directory called digits. A warning ends the program.
    """
    environment = {key: value for key, value in os.environ.items() if key[:7] != "LABCTL_"}
    environment |= {"LABCTL_RUN_DIR": str(run), "LABCTL_RUN_ID": "run-1", "SEED": "1"}
    if data:
        environment["LABCTL_DATA_DIR"] = str(data.parent)
    run.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-B", "-W", "error", str(TEMPLATE / program), *arguments],
        cwd=run,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], exit_code: int = 0) -> str:
    """Wait for a program and return its output; it must end with `exit_code`."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == exit_code, output
    return output

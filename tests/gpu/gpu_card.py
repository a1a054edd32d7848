"""The GPU under test, and the figures that tests note of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from labctl.agent.host.gpus import open_nvml

HERE = Path(__file__).parent
MIB = 1024**2
# seconds of products before the driver's averages (of power, of use) are those of the load
SETTLED_S = 4.0
NoteFigure = Callable[[str, object], None]


def find_obstacle() -> str:
    """Say why a GPU cannot be tested here; "" if it can. PyTorch, which takes long, stays out."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return "other tests run beside it, but it needs the GPU for itself"
    if open_nvml() is None:
        return "no NVIDIA GPU is here"
    return "" if importlib.util.find_spec("torch") else "PyTorch is not installed: labctl[train]"


@contextlib.contextmanager
def run_load() -> Iterator[subprocess.Popen[str]]:
    """Keep the GPU busy with matrix products, by a process that has settled."""
    process = subprocess.Popen(
        [sys.executable, "-B", str(HERE / "matrix_load.py"), str(SETTLED_S)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        yield process
    finally:
        process.kill()
        process.communicate()

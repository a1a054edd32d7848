"""Trainings of the templates for several GPUs, in processes that torchrun starts on this CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from template_project import REPOSITORY


def start(template: str, run: Path, *arguments: str, processes: int = 2) -> subprocess.Popen[str]:
    """Start a template's train.py in the directory `run`, as labctl does; alone as by `python`."""
    run.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    program = str(REPOSITORY / "templates" / template / "train.py")
    words = [*(launcher if processes > 1 else []), program, *arguments]
    return subprocess.Popen(
        [sys.executable, "-B", *words],
        cwd=run,
        env={name: value for name, value in os.environ.items() if name[:7] != "LABCTL_"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

"""Running a verb again as root, through sudo without a password."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ...wire.verbs import Reply, Request, Verb
from ..program import PROGRAM, call_program


def can_sudo() -> bool:
    if not shutil.which("sudo"):
        return False
    done = subprocess.run(["sudo", "-n", "true"], capture_output=True, timeout=20, check=False)
    return done.returncode == 0


def call_as_root(verb: Verb[Request, Reply], request: Request) -> Reply:
    """Run this verb again as root; return its reply or raise its Failure."""
    program = PROGRAM / "__main__.py"
    words = ["sudo", "-n", "env", f"HOME={Path.home()}"]
    return call_program([*words, sys.executable, "-I", "-S", "-B", str(program)], verb, request)

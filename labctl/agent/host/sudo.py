"""Running a verb again as root, through sudo without a password."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ...wire.codec import encode
from ...wire.verbs import Reply, Request, Verb
from ..program import PROGRAM
from ..reply import parse_reply


def can_sudo() -> bool:
    if not shutil.which("sudo"):
        return False
    done = subprocess.run(["sudo", "-n", "true"], capture_output=True, timeout=20, check=False)
    return done.returncode == 0


def call_as_root(verb: Verb[Request, Reply], request: Request) -> Reply:
    """Run this verb again as root; return its reply or raise its Failure."""
    program = PROGRAM / "__main__.py"
    words = ["sudo", "-n", "env", f"HOME={Path.home()}"]
    done = subprocess.run(
        [*words, sys.executable, "-I", "-S", "-B", str(program), verb.name],
        input=encode(request) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    return parse_reply(verb, done.stdout, done.stderr)
